"""One forward call of the root module, while it runs; and where a tensor's rows stand in it.

Decides with integers which dimensions of a shape run over the call's slots. Touches no tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trainfer.check.dump.records import NO_TABLE, Role


class Place(NamedTuple):
    """Where in a call a tensor stood."""

    module: str
    occurrence: int
    function: str | None
    role: Role
    name: str


class RowView(NamedTuple):
    """How to find a tensor's rows."""

    row_dims: tuple[int, ...]
    table: int
    expand: bool = False
    """True where dimension 0 is 1 and serves every batch entry."""
    batch: int = 0
    keep: np.ndarray | None = None
    """Rows to keep, counted along the flattened row dimensions; None for all."""


NO_ROWS = RowView((), NO_TABLE)


@dataclass(slots=True, kw_only=True)
class SlotSubset:
    """Slots of some columns (of the head's output, say), and those of them that a filter keeps."""

    table: int
    columns: int
    """Columns per batch entry that tensors of this subset have."""
    keep: np.ndarray | None = None


@dataclass(slots=True, kw_only=True)
class ForwardCall:
    """State of one forward call of the root."""

    number: int
    step: int
    pass_name: str
    weights_version: int
    batch: int
    length: int
    recorded: bool
    """False for a call that the filters leave out."""
    every: SlotSubset | None
    """All slots; None where the rows are unknown."""
    kept: SlotSubset | None = None
    """The slots whose logits were asked for, where those are fewer or in another order."""
    occurrences: dict[str, int] = field(default_factory=dict[str, int])
    _views: dict[tuple[int, ...], RowView] = field(default_factory=dict[tuple[int, ...], RowView])

    def occurrence(self, name: str) -> int:
        """0 for the first time a module or function runs in this call, 1 for the second."""
        number = self.occurrences.get(name, -1) + 1
        self.occurrences[name] = number
        return number

    def row_view(self, shape: Sequence[int], *, head: bool) -> RowView:
        """Which dimensions of a tensor run over slots; ``head`` for the output head and what it gives."""
        every = self.every
        if every is None or not shape:
            return NO_ROWS
        key = (*shape, -1) if head else tuple(shape)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._find_rows(every, shape, head=head)
        return view

    def _find_rows(self, every: SlotSubset, shape: Sequence[int], *, head: bool) -> RowView:
        kept = self.kept
        if kept is not None and (head or kept.columns != self.length):
            dims = _dims(shape, self.batch, kept.columns)
            if dims is not None and (head or _dims(shape, self.batch, self.length) is None):
                return RowView(dims, kept.table, keep=kept.keep)
        dims = _dims(shape, self.batch, self.length)
        if dims is not None:
            return RowView(dims, every.table, keep=every.keep)
        if len(shape) > 1 and shape[0] == 1 and shape[1] == self.length:
            return RowView((0, 1), every.table, expand=True, batch=self.batch, keep=every.keep)
        return NO_ROWS


def _dims(shape: Sequence[int], batch: int, columns: int) -> tuple[int, ...] | None:
    if len(shape) > 1 and shape[0] == batch and shape[1] == columns:
        return (0, 1)
    if len(shape) == 4 and shape[0] == batch and shape[2] == columns:
        return (0, 2)
    if shape[0] == batch * columns:
        return (0,)
    return None
