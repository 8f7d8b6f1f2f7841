"""Which slot of the decode window holds which sequence, and the tensors of one decode step.

Takes the sequences that decode now; gives ids, positions and the plan of one forward ``[1, B]``, B a multiple
of ``rules.KeyLengths.decode_rows``. A sequence keeps its slot while it runs; slots of finished ones are taken by newcomers or
by the last slot's sequence, so that no hole costs compute for long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfer.engines.builtin.kv_cache import DecodePlan, DecodeWindow, PagedCache
from trainfer.engines.builtin.scheduler import Tracked
from trainfer.exact.attention import safe_key_length
from trainfer.exact.rules import key_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """Inputs of one decode forward."""

    input_ids_B: Tensor
    plan: DecodePlan
    slots: tuple[Tracked, ...]
    """The sequence of each slot; B is padded beyond them."""


class DecodeSlots:
    """Keeps the window in step with the sequences that decode."""

    def __init__(self, cache: PagedCache, num_slots: int, device: torch.device) -> None:
        self._window = DecodeWindow(cache, num_slots, device)
        self._device = device
        self._slots: list[Tracked] = []

    def rows(self, sequences: Sequence[Tracked]) -> DecodeRows:
        """Place the sequences and build the step's tensors; every last token has a block of its own."""
        longest = max(sequence.length for sequence in sequences)
        self._window.reserve(longest)
        self._place(sequences)
        num_idle = -len(self._slots) % key_lengths().decode_rows
        positions = [sequence.length - 1 for sequence in self._slots] + [0] * num_idle
        capacity = self._window.capacity
        columns = torch.tensor(
            [
                [sequence.last_token for sequence in self._slots] + [self._slots[0].last_token] * num_idle,
                positions,
                [slot * capacity + position for slot, position in enumerate(positions)],
            ],
            dtype=torch.int64,
            device=self._device,
        )
        plan = DecodePlan(
            window=self._window,
            window_rows_B=columns[2],
            positions_B=columns[1],
            key_length=safe_key_length(longest),
            masks={},
            sequences=tuple(self._slots),
        )
        return DecodeRows(
            input_ids_B=columns[0],
            plan=plan,
            slots=tuple(self._slots),
        )

    def _place(self, sequences: Sequence[Tracked]) -> None:
        """Give slots of sequences that left to newcomers, then to the sequences of the last slots."""
        wanted, held = set(sequences), set(self._slots)
        if wanted == held:
            return
        count = len(sequences)
        holes = [slot for slot in range(count) if slot >= len(self._slots) or self._slots[slot] not in wanted]
        moving = [sequence for sequence in self._slots[count:] if sequence in wanted]
        arriving = [sequence for sequence in sequences if sequence not in held] + moving
        places = {sequence: slot for slot, sequence in enumerate(self._slots)}
        self._slots = self._slots[:count] + arriving[: max(0, count - len(self._slots))]
        for slot, sequence in zip(holes, arriving, strict=True):
            self._slots[slot] = sequence
            if sequence in places:
                self._window.move(places[sequence], slot)
            else:
                self._window.fill(slot, sequence.blocks, sequence.length - 1)
