"""What a replay measured of one module, as numbers: terms, row norms, floors by kind.

Takes captured and replayed values; gives relative norms per row, and one noise floor for all modules of a kind.
"""
# pyright: standard
# (torch's own types are partial)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.compare.records import JoinedRows
from trainfer.check.replay.records import NoiseFloor

Widest = Mapping[tuple[object, ...], tuple[float, tuple[str, ...]]]
"""What a floor depends on -> its value and the variants behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """One place of one module, on the joined rows: vectors in float64, ``[n, width]``."""

    outputs: tuple[Tensor, Tensor]
    """What the rollout and training captured."""
    exact: tuple[Tensor, Tensor]
    """The replay of either side's own input."""

    def introduced(self, side: int) -> Tensor:
        """Y − f̂(x) of one side."""
        return self.outputs[side] - self.exact[side]

    @property
    def inherited(self) -> Tensor:
        """f̂(x(train)) − f̂(x(rollout))."""
        return self.exact[1] - self.exact[0]

    @property
    def difference(self) -> Tensor:
        """y(train) − y(rollout)."""
        return self.outputs[1] - self.outputs[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One place, all rows: relative norms, and either side's raw floor."""

    place: str
    rows: JoinedRows
    arrays: tuple[NDArray[np.float64], ...]
    """Introduced (rollout), introduced (train), inherited, difference."""
    floors: tuple[NoiseFloor, NoiseFloor]


def in_order(
    count: int, blocks: Sequence[tuple[NDArray[np.int64], tuple[NDArray[np.float64], ...]]]
) -> tuple[NDArray[np.float64], ...]:
    """Arrays over all joined rows from those of some of them."""
    arrays = tuple(np.zeros(count) for _ in range(4))
    for places, parts in blocks:
        for array, part in zip(arrays, parts, strict=True):
            array[places] = part
    return arrays


def norms(terms: Terms) -> tuple[NDArray[np.float64], ...]:
    """Introduced (rollout), introduced (train), inherited, difference of each row over ‖f̂(x(rollout))‖."""
    scale = terms.exact[0].norm(dim=1).clamp(min=1e-300)
    vectors = (terms.introduced(0), terms.introduced(1), terms.inherited, terms.difference)
    return tuple((vector.norm(dim=1) / scale).nan_to_num(nan=np.inf).cpu().numpy() for vector in vectors)


def widened(where: str, floor: NoiseFloor, widest: Widest) -> NoiseFloor:
    """A module's floor as that of all modules of its kind."""
    value, variants = widest[_key(where, floor)]
    return replace(floor, value=value, variants=variants)


def _key(where: str, floor: NoiseFloor) -> tuple[object, ...]:
    leaf = where.rpartition(".")[2]
    return (leaf, floor.operator, floor.dtype, floor.width, floor.contraction, floor.sequence)


def widest_of(items: Sequence[Measured]) -> Widest:
    """One floor per operator, dtype, width, contraction and sequence: the largest that was measured."""
    found: dict[tuple[object, ...], tuple[float, tuple[str, ...]]] = {}
    for item in items:
        for floor in item.floors:
            key = _key(item.place, floor)
            value, variants = found.get(key, (0.0, ()))
            found[key] = max(value, floor.value), max(variants, floor.variants, key=len)
    return found
