"""What watching costs: trainfer's capture and msProbe's, on one model, in one run.

Each side runs in its own process (msProbe in its own environment: ``--peer PYTHON``), one thread, forward and
backward of a Qwen3-shaped model with 8,393,472 parameters on 2 x 256 tokens. Captured steps alternate with steps
that are not captured; the figures are CPU seconds, the ratio of the medians. What a step dumped is deleted after it,
on both sides, so that neither pays for a growing page cache. On a busy machine look at the best steps too (``best``).
``--parts`` takes statistics L0 apart instead: hooks that deliver to nobody, records without numbers, all of it with
NumPy's reductions and with the compiled one; turn by turn in one process of its own.

    python benchmarks/capture.py [--peer /path/to/msprobe/python] [--steps 6] [--json FILE]
    python benchmarks/capture.py --parts [--steps 6]
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGETS = {("statistics", "L0"): 1.10, ("tensor", "L0"): 1.8}
CASES = [
    ("statistics", "L0"),
    ("statistics", "L1"),
    ("statistics", "mix"),
    ("tensor", "L0"),
    ("tensor", "L1"),
    ("tensor", "mix"),
    ("sketch", "L0"),
]
PEER_CASES = [case for case in CASES if case[0] != "sketch"]


def make_model():
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train()
    return model, torch.randint(0, 4096, (2, 256))


def one_step(model, ids) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()


def cpu_of(action) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def folder_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def summarise(pairs, nbytes: list[float], base_mb: float) -> dict[str, float]:
    plain, captured = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {
        "base_cpu_s": statistics.median(cpu for cpu, _ in plain),
        "cpu_ratio": statistics.median(c[0] for c in captured) / statistics.median(p[0] for p in plain),
        "cpu_ratio_best": min(c[0] for c in captured) / min(p[0] for p in plain),
        "wall_ratio": statistics.median(c[1] for c in captured) / statistics.median(p[1] for p in plain),
        "mb_per_step": statistics.median(nbytes),
        "peak_mb_above_base": peak_mb() - base_mb,
    }


def run_ours(task: str, level: str, steps: int, folder: Path) -> dict[str, float]:
    """A dump a step, all of it on disk within the measured time; the fingerprints are taken once, before it."""
    import trainfer

    model, ids = make_model()
    one_step(model, ids)
    base_mb, pairs, nbytes = peak_mb(), [], []
    for _ in range(steps + 1):
        plain = cpu_of(lambda: one_step(model, ids))
        context = trainfer.capture(model, folder, side="train", task=task, level=level, backward=True)
        context.__enter__()

        def captured(context=context) -> None:
            one_step(model, ids)
            context.__exit__(None, None, None)

        pairs.append((plain, cpu_of(captured)))
        nbytes.append(folder_mb(folder))
        shutil.rmtree(folder)
    return summarise(pairs[1:], nbytes[1:], base_mb)


def run_parts(task: str, level: str, steps: int, folder: Path) -> dict[str, list[float]]:
    """CPU seconds of steps that are captured by more and more of the probe."""
    import trainfer
    from trainfer.check.probe import fused
    from trainfer.check.probe.sink import TensorSink
    from trainfer.check.probe.statistics import StatisticsTaker, nothing_finite

    model, ids = make_model()
    one_step(model, ids)
    record, take, load = TensorSink.record, StatisticsTaker.take, fused.load
    constant = nothing_finite(1, 1, 0)
    parts = {
        "hooks alone": (lambda *_args, **_kwargs: None, take, load),
        "and records": (record, lambda *_args: constant, load),
        "and numbers, NumPy": (record, take, lambda: None),
        "and numbers, compiled": (record, take, load),
    }
    seconds: dict[str, list[float]] = {"no capture": [], **{part: [] for part in parts}}
    for _ in range(steps + 1):
        seconds["no capture"].append(cpu_of(lambda: one_step(model, ids))[0])
        for part, (TensorSink.record, StatisticsTaker.take, fused.load) in parts.items():
            context = trainfer.capture(model, folder, side="train", task=task, level=level, backward=True)
            context.__enter__()

            def captured(context=context) -> None:
                one_step(model, ids)
                context.__exit__(None, None, None)

            seconds[part].append(cpu_of(captured)[0])
            shutil.rmtree(folder)
    return {part: taken[1:] for part, taken in seconds.items()}


def run_peer(task: str, level: str, steps: int, folder: Path) -> dict[str, float]:
    """A step directory a step, complete within the measured time."""
    from msprobe.pytorch import PrecisionDebugger

    model, ids = make_model()
    one_step(model, ids)
    base_mb, pairs, nbytes = peak_mb(), [], []
    debugger = PrecisionDebugger(dump_path=str(folder), task=task, level=level)
    for _ in range(steps + 1):
        plain = cpu_of(lambda: one_step(model, ids))

        def captured() -> None:
            debugger.start(model=model)
            one_step(model, ids)
            debugger.stop()
            debugger.step()

        pairs.append((plain, cpu_of(captured)))
        nbytes.append(folder_mb(folder))
        for done in folder.iterdir():
            shutil.rmtree(done)
    return summarise(pairs[1:], nbytes[1:], base_mb)


CHILDREN = {"trainfer": run_ours, "parts": run_parts, "msprobe": run_peer}


def child(python: str, who: str, task: str, level: str, steps: int) -> dict:
    """Run one side by itself, with one thread: BLAS threads that wait for work would be counted as its CPU seconds."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--child", who, task, level, str(steps), folder]
        done = subprocess.run(
            command, env={**os.environ, **threads}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{who} {task} {level} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", help="Python of an environment with mindstudio-probe 26.2.0, torch and transformers"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", action="store_true", help="what each part of statistics L0 costs")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        who, task, level, steps, folder = arguments.child
        run = CHILDREN[who]
        print(json.dumps(run(task, level, int(steps), Path(folder) / "dump")))
        return
    if arguments.parts:
        parts = child(sys.executable, "parts", "statistics", "L0", arguments.steps)
        base = parts["no capture"]
        for part, seconds in parts.items():
            median = statistics.median(seconds) / statistics.median(base)
            print(f"{part:24} {median:6.3f} x, best steps {min(seconds) / min(base):6.3f} x")
        return
    rows = []
    print(
        f"{'who':10} {'task':11} {'level':5} {'CPU x':>6} {'best x':>6} {'wall x':>6} {'MB/step':>8} {'peak MB':>8}  target"
    )
    for task, level in CASES:
        sides = [("trainfer", sys.executable)]
        if arguments.peer and (task, level) in PEER_CASES:
            sides.append(("msprobe", arguments.peer))
        for who, python in sides:
            row = child(python, who, task, level, arguments.steps)
            rows.append({"who": who, "task": task, "level": level, **row})
            target = TARGETS.get((task, level)) if who == "trainfer" else None
            verdict = (
                "" if target is None else f"{target:.2f} {'met' if row['cpu_ratio'] <= target else 'MISSED'}"
            )
            print(
                f"{who:10} {task:11} {level:5} {row['cpu_ratio']:6.2f} {row['cpu_ratio_best']:6.2f} {row['wall_ratio']:6.2f} "
                f"{row['mb_per_step']:8.1f} {row['peak_mb_above_base']:8.0f}  {verdict}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
