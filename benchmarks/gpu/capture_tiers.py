"""What watching a training step costs on a CUDA device, tier by tier.

    python benchmarks/gpu/capture_tiers.py [--sequences 16] [--length 1024] [--rounds 5] [--folder /tmp/tiers]

Random model in the shape of Qwen3-0.6B (vocabulary 32,000, bf16 parameters), forward and backward of the trainer's own
packed pass, turn by turn in one process: off; always on (fingerprints of all weights on both sides and the agreement
metrics, which a training step computes anyway); sketch, statistics and tensor of every module's inputs and outputs (L0).
Prints milliseconds (medians), the ratio to off, and for the tensor tier the bytes, their rate until all is on disk, and the
share of the slower of the two limits that are measured in the same run: the copy from the device into page-locked memory
and the write to the disk.
"""

import argparse
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from shapes import VOCABULARY, qwen3_06b
from torch import Tensor, nn

import trainfer
from trainfer.engines.module_weights import fingerprints
from trainfer.exact.packed import pack
from trainfer.exact.scores import forward_scores
from trainfer.train.agreement import measure

TIERS = ("off", "always", "sketch", "statistics", "tensor")


def seconds_of(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate(nbytes: int = 1 << 30) -> float:
    """Bytes a second from the device into page-locked memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    work = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
    seconds_of(work)
    return nbytes / min(seconds_of(work) for _ in range(3))


def disk_rate(folder: Path, nbytes: int = 1 << 31) -> float:
    """Bytes a second of plain writes of 16 MiB from memory that has been read before."""
    block = os.urandom(1 << 24)
    path = folder / "rate"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
    rate = nbytes / (time.perf_counter() - start)
    path.unlink()
    return rate


class Step:
    """Forward and backward over one packed batch."""

    def __init__(self, sequences: int, length: int) -> None:
        numbers = random.Random(0)
        self.rows = [[numbers.randrange(VOCABULARY) for _ in range(length)] for _ in range(sequences)]
        self.model = qwen3_06b().train()
        self.batch = pack(self.rows, [1] * sequences, device="cuda")
        self.temperatures = torch.ones(self.batch.num_scored, device="cuda")
        self.weights = torch.randn(self.batch.num_scored, device="cuda")
        self.logprobs = torch.empty(0)

    def run(self) -> None:
        logprobs: Tensor = forward_scores(self.model, self.batch, self.temperatures)[0]
        (logprobs @ self.weights).backward()
        self.model.zero_grad(set_to_none=True)
        self.logprobs = logprobs.detach()

    def watched(self, tier: str, capture: AbstractContextManager[object] | None) -> None:
        """One step in an open capture, which is closed; all that it took is on disk then."""
        self.run()
        if capture is not None:
            capture.__exit__(None, None, None)
        elif tier == "always":
            fingerprints(self.model)
            fingerprints(self.model)
            values = self.logprobs.tolist()
            measure([values], [values])


def parameters_of(model: nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tiers"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    step = Step(arguments.sequences, arguments.length)
    times: dict[str, list[float]] = {tier: [] for tier in arguments.tiers}
    written: dict[str, int] = dict.fromkeys(TIERS, 0)
    for turn in range(arguments.rounds + 1):
        for tier in arguments.tiers:
            folder = arguments.folder / tier
            capture = None
            if tier not in ("off", "always"):
                capture = trainfer.capture(step.model, folder, side="train", pass_name="update", task=tier)
                capture.__enter__()
            took = seconds_of(lambda tier=tier, capture=capture: step.watched(tier, capture))
            if folder.exists():
                written[tier] = folder_bytes(folder)
                shutil.rmtree(folder)
            if turn:
                times[tier].append(took)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.sequences} x {arguments.length} tokens, "
        f"{parameters_of(step.model):.0f} M parameters"
    )
    off = statistics.median(times["off"])
    for tier in arguments.tiers:
        took = statistics.median(times[tier])
        pairs = zip(times[tier], times["off"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{tier:10} {took * 1000:8.1f} ms, {ratio:7.3f} x off, {written[tier] / 1e6:9.1f} MB")
    if "tensor" not in arguments.tiers:
        return
    copy, disk = copy_rate(), disk_rate(arguments.folder)
    rate = written["tensor"] / (statistics.median(times["tensor"]) - off)
    print(
        f"tensor tier: {rate / 1e9:.2f} GB/s until all is on disk; copy {copy / 1e9:.2f} GB/s, disk {disk / 1e9:.2f} GB/s: "
        f"{rate / min(copy, disk):.0%} of the slower"
    )


if __name__ == "__main__":
    main()
