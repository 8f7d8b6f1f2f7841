"""Builtin engine, exact, against vLLM on one CUDA device, turn by turn in one run.

    python benchmarks/gpu/against_vllm.py --make-model /tmp/model
    python benchmarks/peers/vllm_gpu.py /tmp/model /tmp/vllm &                       # in an environment with vLLM
    VLLM_BATCH_INVARIANT=1 python benchmarks/peers/vllm_gpu.py /tmp/model /tmp/vllm-invariant &
    python benchmarks/gpu/against_vllm.py --peer /tmp/vllm --peer /tmp/vllm-invariant [--rounds 3] [--wait 120]

The shape of Qwen3-0.6B with a vocabulary of 32,000, random weights, bf16, the sampled token's log-prob on both sides. Times are
the caller's: the whole of 64 x (128 + 512), and a decode step at a context of 936 to 1064 as the difference of 129 new tokens
and 1. The engines stay loaded side by side; only one works at a time.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from shapes import qwen3_06b, requests_of

from trainfer.engines.builtin.gpu_engine import GpuEngine
from trainfer.engines.limits import EngineLimits
from trainfer.train.rollout.engine import Engine

LOADS = {
    "64 x (128 + 512)": [(64, 128, 512)],
    "step, 64 at 1000": [(64, 936, 129), (64, 936, 1)],
    "step, 8 at 1000": [(8, 936, 129), (8, 936, 1)],
}


def our_seconds(engine: Engine, load: tuple[int, int, int]) -> float:
    sequences, prompt, new = load
    requests = requests_of(sequences, prompt=prompt, new=new)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    engine.generate(requests)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


class Peer:
    """A waiting vLLM process."""

    def __init__(self, folder: Path, wait: float) -> None:
        end = time.monotonic() + wait
        while not (folder / "ready.json").exists():
            if time.monotonic() > end:
                sys.exit(f"{folder} is not ready after {wait} s")
            time.sleep(0.2)
        facts = json.loads((folder / "ready.json").read_text())
        self.name = f"vLLM {facts['vllm']}" + (", batch-invariant" if facts["batch_invariant"] else "")
        self._folder, self._number = folder, 0

    def seconds(self, load: tuple[int, int, int]) -> float:
        ask = dict(zip(("sequences", "prompt", "new"), load, strict=True))
        unfinished = self._folder / "ask.part"
        unfinished.write_text(json.dumps(ask))
        unfinished.rename(self._folder / f"ask-{self._number}.json")
        answer = self._folder / f"answer-{self._number}.json"
        while not answer.exists():
            time.sleep(0.02)
        self._number += 1
        return json.loads(answer.read_text())["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make-model", type=Path)
    parser.add_argument("--peer", type=Path, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=120)
    arguments = parser.parse_args()
    if arguments.make_model:
        qwen3_06b(attention="sdpa").save_pretrained(arguments.make_model)
        return
    engine = GpuEngine(qwen3_06b(), limits=EngineLimits(max_num_seqs=64, max_num_batched_tokens=16384))
    our_seconds(engine, (64, 128, 16))
    our_seconds(engine, (8, 936, 16))
    sides = {"builtin, exact": lambda load: our_seconds(engine, load)}
    for folder in arguments.peer:
        peer = Peer(folder, arguments.wait)
        sides[peer.name] = peer.seconds
    for name, loads in LOADS.items():
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(arguments.rounds + 1):
            for side, seconds in sides.items():
                values = [seconds(load) for load in loads]
                took = values[0] if len(values) == 1 else (values[0] - values[1]) / (loads[0][2] - 1)
                if turn:
                    times[side].append(took)
        for side, values in times.items():
            took = statistics.median(values)
            ratio = statistics.median(
                theirs / ours for theirs, ours in zip(values, times["builtin, exact"], strict=True)
            )
            shown = (
                f"{64 * 512 / took:9,.0f} tokens/s" if len(loads) == 1 else f"{took * 1000:9.2f} ms a step"
            )
            print(
                f"{name:18} {side:32} {shown}, range {min(values):.4f} to {max(values):.4f} s, {ratio:.2f} of our time",
                flush=True,
            )
    for folder in arguments.peer:
        (folder / "stop").touch()


if __name__ == "__main__":
    main()
