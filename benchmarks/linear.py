"""The routed linear (oneDNN) against PyTorch's own on a CPU in float32: time, and at which row counts a row keeps its bits.

One thread, CPU seconds, minimum of repeated rounds taken turn by turn.
"""

import time

import torch
import torch.nn.functional as F

from trainfer.exact.linear import linear

SHAPES = [(256, 768), (768, 256), (256, 256), (1024, 3072)]
ROWS = [8, 16, 64, 1184]


def seconds(call, repeats: int) -> float:
    began = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - began) / repeats


def changed_counts(product, weight: torch.Tensor) -> list[int]:
    """Row counts from 1 to 64 at which the first rows differ from the same rows in a batch of 1,200."""
    rows = torch.randn(1200, weight.shape[1])
    whole = product(rows, weight)
    return [n for n in range(1, 65) if not torch.equal(product(rows[:n], weight), whole[:n])]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for size_in, size_out in SHAPES:
        weight = torch.randn(size_out, size_in)
        print(
            f"in {size_in}, out {size_out}: bits change at PyTorch {changed_counts(F.linear, weight)}, routed {changed_counts(linear, weight)}"
        )
        for count in ROWS:
            rows = torch.randn(count, size_in)
            repeats = max(3, 20_000_000 // (count * size_in * size_out) * 10)
            times = [
                (
                    seconds(lambda r=rows, w=weight: F.linear(r, w), repeats),
                    seconds(lambda r=rows, w=weight: linear(r, w), repeats),
                )
                for _ in range(5)
            ]
            plain, routed = (min(column) for column in zip(*times, strict=True))
            flop = 2 * count * size_in * size_out
            print(
                f"  {count:5} rows  PyTorch {flop / plain / 1e9:4.0f} GFLOP/s  routed {flop / routed / 1e9:4.0f} GFLOP/s  time ratio {routed / plain:.2f}"
            )


if __name__ == "__main__":
    main()
