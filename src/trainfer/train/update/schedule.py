"""Which sequences make which optimizer step, and at what learning rate: integers and floats, no tensors.

Takes counts, a seed and how many updates came before; gives the same answer for the same arguments, so
a resumed run repeats it without any stored generator.
"""

import math
import random
from dataclasses import dataclass


def mini_batches(
    num_sequences: int, *, mini_batch_sequences: int, epochs: int, shuffle_seed: int | None, update: int
) -> list[list[int]]:
    """Indices of the sequences of each optimizer step of one update, epoch after epoch.

    Example: 4 sequences, mini-batches of 2, 2 epochs, no shuffle give ``[[0, 1], [2, 3], [0, 1], [2, 3]]``.

    Args:
        num_sequences: A multiple of ``mini_batch_sequences``.
        mini_batch_sequences: Sequences of one optimizer step.
        epochs: Passes over the sequences.
        shuffle_seed: Draw the sequences of each mini-batch anew for every pass; None keeps their order.
        update: Updates before this one, since the start of the run.
    """
    assert num_sequences % mini_batch_sequences == 0, "the plan makes mini-batches of equal size"
    steps: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(num_sequences))
        if shuffle_seed is not None:
            # A string seeds by its hash over SHA-512: stable across processes and Python versions.
            random.Random(f"{shuffle_seed}/{update}/{epoch}").shuffle(order)
        steps += [order[i : i + mini_batch_sequences] for i in range(0, num_sequences, mini_batch_sequences)]
    return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """verl's schedules: linear warm-up from 0, then constant or cosine.

    One update (all its optimizer steps) is one step of the schedule, as in verl 0.9.1. The first update
    of a warm-up therefore has learning rate 0, as there.
    """

    peak: float
    warmup_updates: int = 0
    cosine: bool = False
    total_updates: int = 1
    """Only the cosine looks at it."""
    min_ratio: float = 0.0
    num_cycles: float = 0.5

    def at(self, update: int) -> float:
        """Learning rate of the update after ``update`` others."""
        if update < self.warmup_updates:
            return self.peak * update / self.warmup_updates
        if not self.cosine:
            return self.peak
        progress = (update - self.warmup_updates) / max(1, self.total_updates - self.warmup_updates)
        wave = math.cos(math.pi * self.num_cycles * 2.0 * progress)
        ratio = (1.0 + self.min_ratio) / 2 + (1.0 - self.min_ratio) / 2 * wave
        return self.peak * max(0.0, ratio)
