"""One GRPO step of trainfer against one of TRL's GRPOTrainer, paired step by step in one run.

The same 3.7 M parameter Qwen2-shaped model (float32), 4 prompts × 4 samples × 64 new tokens, no KL term, one thread. Both
programs are started, warmed up, and then take turns, so that the machine's mood hits both. CPU seconds of the whole
step are compared: generation, reward, log-probs, update, and (for trainfer) agreement metrics, the hand-over of the
weights with its proof, and the run folder.

TRL lives in an environment of its own, made on the first run; ``--trl-python`` names an existing one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
TRL_ENVIRONMENT = HERE.parent / ".venv-trl"
TRL_REQUIREMENTS = ("torch==2.13.0", "trl==1.16.0")
PROMPT = "What is {0} + {1}? The answer is "
DATA_SOURCE = "benchmark/share_of_digits"


def share_of_digits(response: str, ground_truth: str) -> float:
    return sum(c.isdigit() for c in response) / max(1, len(response))


def make_model(folder: Path) -> None:
    """3.67 M parameters; the bytes' tokenizer leaves the rest of the vocabulary unused."""
    from trainfer.integrations.transformers.load import byte_tokenizer, save_model, tiny_model

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    model = tiny_model(
        "qwen2",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_positions=512,
        seed=0,
    )
    save_model(model, folder, tokenizer=tokenizer)


def write_prompts(file: Path) -> None:
    with file.open("w") as lines:
        for i in range(256):
            row = {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": PROMPT.format(i, i + 1)}],
                "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
            }
            lines.write(json.dumps(row) + "\n")


def our_steps(
    folder: str, steps: int, prompts: int, group: int, new_tokens: int
) -> Iterator[dict[str, float]]:
    """Timings of trainfer's steps, by stage; the generator's pauses are the driver's."""
    import torch

    from trainfer.config.load import load_config
    from trainfer.run import train
    from trainfer.train.reward.registry import SCORERS, Scorer

    torch.set_num_threads(1)
    SCORERS[DATA_SOURCE] = Scorer(strict=share_of_digits, flexible=None, near_miss=lambda *_: False)
    work = Path(folder).parent
    loaded = load_config(
        None,
        [
            f"data.train_files={work / 'prompts.jsonl'}",
            f"data.train_batch_size={prompts}",
            "data.max_prompt_length=64",
            f"data.max_response_length={new_tokens}",
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={prompts * group}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={prompts * group}",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.rollout.name=builtin",
            f"actor_rollout_ref.rollout.n={group}",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=1000",
            "trainer.save_freq=-1",
            "trainer.logger=[file]",
            f"trainer.default_local_dir={work / 'run'}",
        ],
    )
    for report in train(loaded):
        yield {name: value for name, value in report.metrics.items() if name.startswith("timing_s/")}


def serve_our_steps(arguments: list[str]) -> None:
    """The same protocol as ``peers/trl_grpo.py``."""
    steps = our_steps(arguments[0], *(int(number) for number in arguments[1:]))
    for _ in range(int(arguments[1])):
        print("ready", flush=True)
        sys.stdin.readline()
        wall, cpu = time.perf_counter(), time.process_time()
        stages = next(steps)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps({"cpu": cpu, "wall": wall, **stages}), flush=True)


def trl_python(given: str | None) -> str:
    if given:
        return given
    python = TRL_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"making {TRL_ENVIRONMENT.name} with {', '.join(TRL_REQUIREMENTS)} …", flush=True)
        venv.create(TRL_ENVIRONMENT, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL_REQUIREMENTS], check=True)
    return str(python)


class Peer:
    """One program that takes a step per line."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )

    def wait_until_ready(self) -> None:
        while self._line() != "ready":
            pass

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        while not (line := self._line()).startswith("{"):
            pass
        return json.loads(line)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
        return line.strip()


def compare(options: argparse.Namespace, folder: Path) -> None:
    model = folder / "model"
    make_model(model)
    write_prompts(folder / "prompts.jsonl")
    total = options.warmup + options.steps
    sizes = [str(model), str(total), str(options.prompts), str(options.group), str(options.new_tokens)]
    ours = Peer("trainfer", [sys.executable, __file__, "--serve", *sizes], folder / "trainfer.log")
    trl = Peer(
        "TRL", [trl_python(options.trl_python), str(HERE / "peers/trl_grpo.py"), *sizes], folder / "trl.log"
    )
    records: dict[str, list[dict[str, float]]] = {"trainfer": [], "TRL": []}
    for number in range(total):
        for peer in (ours, trl):
            peer.wait_until_ready()
            record = peer.step()
            if number >= options.warmup:
                records[peer.name].append(record)
    for peer in (ours, trl):
        peer.process.kill()
    report(records)


def report(records: dict[str, list[dict[str, float]]]) -> None:
    for name, rows in records.items():
        cpu = [row["cpu"] for row in rows]
        print(
            f"{name:9} {median(cpu):.3f} CPU s a step (min {min(cpu):.3f}, max {max(cpu):.3f}, {len(cpu)} steps)"
        )
    ratios = [a["cpu"] / b["cpu"] for a, b in zip(records["trainfer"], records["TRL"], strict=True)]
    print(f"ratio     {median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f}); aim: at most 0.50")
    stages = [key for key in records["trainfer"][0] if key.startswith("timing_s/")]
    print("where trainfer's time goes (median wall s):")
    for stage in stages:
        print(
            f"  {stage.removeprefix('timing_s/'):18} {median(row[stage] for row in records['trainfer']):.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--trl-python", help="python of an environment that has TRL")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    if options.serve:
        serve_our_steps(options.serve)
        return
    with TemporaryDirectory() as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
