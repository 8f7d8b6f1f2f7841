"""The attention plan of packed rows on a CUDA device: one kernel call a layer, whatever the lengths.

Takes a ``RowLayout``; gives a ``GpuPlan``. Queries stay where they are on the row axis; keys do too, unless
sequences share a prompt: then each sequence's keys are gathered once per layer. Forms that the kernel does not
compute (windows, soft-caps, dropout, other dtypes) go to the plan of ``exact.plan``, made when first asked for.

Axes: T rows, H, G, K heads and head size.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainfer.exact.attention import AttentionForm, round_up
from trainfer.exact.gpu_attention import QUERY_BLOCK, packed_attention, supports
from trainfer.exact.layout import RowLayout, SequenceRows
from trainfer.exact.plan import PackedPlan, plan_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """Attention within each sequence of a packed row axis."""

    tiles: Tensor
    """See ``gpu_attention.packed_forward``; the longest first."""
    key_rows: Tensor | None
    """Row of each key where prompts are shared; None is the rows themselves."""
    cumulative: tuple[Tensor, Tensor]
    """Ends of the runs among queries and among keys, ``[runs + 1]`` int32, from 0."""
    longest: tuple[int, int]
    layout: RowLayout
    """Whose rows are whose; a probe reads it."""
    row_multiple: int
    fallback: dict[None, PackedPlan] = field(default_factory=dict)
    """The plan for other forms, once one was asked for."""

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[T, H, K]``."""
        if not is_plain(form, longest=self.longest[1]) or not supports(query_THK.dtype, query_THK.shape[-1]):
            return self._other().attend(query_THK, key_TGK, value_TGK, form)
        if self.key_rows is not None:
            key_TGK = key_TGK.index_select(0, self.key_rows)
            value_TGK = value_TGK.index_select(0, self.key_rows)
        return packed_attention(
            query_THK, key_TGK, value_TGK, self.tiles, self.cumulative, self.longest, form.scale
        )

    def _other(self) -> PackedPlan:
        if None not in self.fallback:
            self.fallback[None] = plan_layout(
                self.layout, device=self.tiles.device, row_multiple=self.row_multiple
            )
        return self.fallback[None]


def is_plain(form: AttentionForm, *, longest: int) -> bool:
    """Whether every row of sequences up to this length sees all rows before it, with nothing done to the scores."""
    return form.softcap is None and not form.dropout and (form.window is None or form.window >= longest)


def gpu_plan(layout: RowLayout, *, device: torch.device | str, row_multiple: int) -> GpuPlan:
    """The plan of a layout whose rows are padded to a multiple of ``row_multiple`` with dummies."""
    runs = _runs(layout, row_multiple)
    shares = any(run.stem_length for run in runs)
    tiles: list[tuple[int, int, int, int]] = []
    query_ends, key_ends = [0], [0]
    for run in runs:
        offset = run.own_start - run.stem_length
        key_start = key_ends[-1] if shares else run.own_start
        tiles += [
            (offset, key_start, first, run.length)
            for first in range(run.stem_length, run.length, QUERY_BLOCK)
        ]
        query_ends.append(query_ends[-1] + run.length - run.stem_length)
        key_ends.append(key_ends[-1] + run.length)
    tiles.sort(key=lambda tile: -tile[2])
    key_rows = [row for run in runs for row in run.rows(range(run.length))] if shares else None
    return GpuPlan(
        tiles=torch.tensor(tiles, dtype=torch.int32).to(device),
        key_rows=None if key_rows is None else torch.tensor(key_rows, dtype=torch.int64).to(device),
        cumulative=(
            torch.tensor(query_ends, dtype=torch.int32).to(device),
            torch.tensor(key_ends, dtype=torch.int32).to(device),
        ),
        longest=(max(run.length - run.stem_length for run in runs), max(run.length for run in runs)),
        layout=layout,
        row_multiple=row_multiple,
    )


def _runs(layout: RowLayout, row_multiple: int) -> list[SequenceRows]:
    """Contiguous rows in their order: shared prompts, sequences, and the dummies as a sequence of their own."""
    num_dummies = round_up(layout.num_rows, row_multiple) - layout.num_rows
    dummies = SequenceRows(stem_start=0, stem_length=0, own_start=layout.num_rows, length=num_dummies)
    runs = [run for run in (*layout.stems, *layout.sequences, dummies) if run.length > run.stem_length]
    return sorted(runs, key=lambda run: run.own_start)
