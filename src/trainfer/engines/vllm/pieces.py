"""Fingerprints of the parts of tensors that workers hold -> fingerprints of whole tensors.

Takes ``Piece`` records of all workers of one engine; gives text by Transformers name. Plain sums: shards add
up, because a fingerprint is a sum over elements; replicas must be equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from trainfer.exact.fingerprint import fingerprint_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of one tensor as a worker computes with it.

    Example: worker 1 of 2 holds columns 32 to 63 of a weight ``[64, 64]``: ``region=(0, 64, 32, 64)``.
    """

    name: str
    """In Transformers."""
    shape: tuple[int, ...]
    """Of the whole tensor, in Transformers' orientation."""
    region: tuple[int, int, int, int]
    """First and past-the-end row, first and past-the-end column, in vLLM's orientation; a vector is one column."""
    dtype: torch.dtype
    sums: tuple[int, int]
    """``partial_fingerprint`` with every element at its place in the whole."""


def whole_fingerprints(pieces: Iterable[Piece]) -> Mapping[str, str]:
    """By name; a tensor whose pieces disagree or leave a hole gets a text that equals no fingerprint."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    return {name: _whole(parts) for name, parts in by_name.items()}


def _whole(parts: list[Piece]) -> str:
    by_region: dict[tuple[int, int, int, int], Piece] = {}
    for part in parts:
        first = by_region.setdefault(part.region, part)
        if (first.sums, first.dtype, first.shape) != (part.sums, part.dtype, part.shape):
            return "replicas of the engine's workers differ"
    shape, dtype = parts[0].shape, parts[0].dtype
    covered = sum((r[1] - r[0]) * (r[3] - r[2]) for r in by_region)
    if covered != prod(shape) or any((p.shape, p.dtype) != (shape, dtype) for p in by_region.values()):
        return f"the engine's workers hold {covered} of {prod(shape)} elements"
    sums = torch.tensor([part.sums for part in by_region.values()], dtype=torch.int64).sum(dim=0)
    return fingerprint_text(dtype, prod(shape), sums)
