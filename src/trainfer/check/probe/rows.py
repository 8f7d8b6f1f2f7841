"""Which row of a forward call is which token of which sequence.

Takes what the root module was called with, as integers; gives a table with the digest of every row's token
prefix, its sequence and position. Positions come from the attention mask and the cache's history, from restarting
positions, or from ``Rows``: never from ``position_ids`` of a padded batch, which may be wrong and are compared.
NumPy only: nothing here touches a model.

Axes: B batch entries, T token slots per entry.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trainfer.check.dump.digest import EMPTY, prefix_digests, token_words
from trainfer.check.dump.reader import ROW_TYPE
from trainfer.check.dump.records import MISSING, RowCounts, RowLayout
from trainfer.check.probe.given import Rows
from trainfer.exact.layout import RowLayout as PackedRows

NamedPrefix = tuple[Hashable, Sequence[int]]
"""A sequence's name and its tokens from position 0 up to and with a row."""

BLANK = np.array((EMPTY, MISSING, MISSING, MISSING), dtype=ROW_TYPE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallInputs:
    """What the root module was called with."""

    tokens_BT: np.ndarray | None
    """Token ids, or None where the call has none."""
    batch: int
    length: int
    mask_B: np.ndarray | None = None
    """2-D attention mask ``[B, cached + T]`` of integers; None where there is none."""
    unreadable: str = ""
    """Why the rows cannot be read, where they cannot: an attention mask or plan that does not tell."""
    positions_BT: np.ndarray | None = None
    segment_starts: np.ndarray | None = None
    """Cumulative lengths of packed sequences (``cu_seq_lens_q``)."""
    cached: int = 0
    """Slots that the cache held before the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """The slots of a call, batch entry by batch entry: an array of ``ROW_TYPE``."""

    slots: np.ndarray
    layout: RowLayout
    counts: RowCounts
    note: str = ""


@dataclass(slots=True)
class CacheHistory:
    """What a key-value cache holds, slot by slot: needed to go on from it, also after a crop."""

    sequences_B: np.ndarray
    counts_BL: np.ndarray
    """Real tokens up to and with each slot."""
    digests_BL: np.ndarray
    """Digest up to and with each slot, ``[B, L, 2]``."""
    ended_B: np.ndarray
    """True once a batch entry has produced its end token."""

    @property
    def length(self) -> int:
        """Slots held."""
        return self.counts_BL.shape[1]


class RowTracker:
    """Names rows across the calls of one capture."""

    def __init__(self, *, end_tokens: frozenset[int] = frozenset()) -> None:
        self._num_sequences = 0
        self._end_tokens = np.array(sorted(end_tokens), dtype=np.int64)
        self._requests: dict[Hashable, tuple[int, list[np.ndarray]]] = {}
        self._prefixes: dict[Hashable, tuple[int, int, np.ndarray]] = {}

    def from_rows(self, rows: Rows, num_slots: int) -> RowTable:
        """A call whose rows were given; slots beyond them are padding."""
        tokens_T = np.asarray(rows.token_ids, dtype=np.int64)
        slots = np.full(max(num_slots, len(tokens_T)), BLANK)
        cached = unknown = 0
        for segment in rows.segments():
            if segment.request is None:
                sequence, before = self._new_sequences(1)[0], EMPTY
            else:
                sequence, before, supplied = self._before(segment.request, segment.first, rows)
                cached += supplied
                if before is None:
                    unknown += segment.stop - segment.start
                    continue
            tokens = tokens_T[segment.start : segment.stop]
            digests = prefix_digests(tokens, first=segment.first, before=before)
            part = slots[segment.start : segment.stop]
            part["digest"], part["sequence"], part["token"] = digests, sequence, tokens
            part["position"] = np.arange(segment.first, segment.first + len(tokens))
            if segment.request is not None:
                self._remember(segment.request, segment.first, digests)
        padding = int(np.count_nonzero(slots["position"] == MISSING)) - unknown
        counts = RowCounts(padding=padding, cached=cached, unknown=unknown)
        return RowTable(slots=slots, layout=RowLayout.GIVEN, counts=counts)

    def from_layout(self, layout: PackedRows, num_slots: int) -> RowTable:
        """A packed call whose plan knows its sequences; rows that several share count once, and dummies not at all."""
        tokens_T = np.asarray(layout.token_ids, dtype=np.int64)
        slots = np.full(max(num_slots, len(tokens_T)), BLANK)
        numbers = self._new_sequences(len(layout.sequences))
        for number, sequence in zip(numbers, layout.sequences, strict=True):
            positions = np.arange(sequence.length)
            rows = np.fromiter(sequence.rows(range(sequence.length)), dtype=np.int64, count=sequence.length)
            digests = prefix_digests(tokens_T[rows])
            fresh = slots["position"][rows] == MISSING
            own = rows[fresh]
            slots["digest"][own], slots["sequence"][own] = digests[fresh], number
            slots["position"][own], slots["token"][own] = positions[fresh], tokens_T[own]
        padding = int(np.count_nonzero(slots["position"] == MISSING))
        return RowTable(slots=slots, layout=RowLayout.PACKED, counts=RowCounts(padding=padding))

    def from_prefixes(self, prefixes: Sequence[NamedPrefix | None], num_slots: int) -> RowTable:
        """A call whose plan names each row's sequence and all its tokens up to the row; None for a dummy row."""
        slots = np.full(max(num_slots, len(prefixes)), BLANK)
        for row, named in enumerate(prefixes):
            if named is None:
                continue
            name, tokens = named
            known = self._prefixes.get(name)
            if known is not None and known[1] == len(tokens) - 1:
                sequence, digest = known[0], known[2]
                digest = prefix_digests(np.array(tokens[-1:]), first=len(tokens) - 1, before=digest)[-1]
            else:
                sequence = known[0] if known is not None else int(self._new_sequences(1)[0])
                digest = prefix_digests(np.array(tokens))[-1]
            self._prefixes[name] = (sequence, len(tokens), digest)
            slots[row] = (digest, sequence, len(tokens) - 1, tokens[-1])
        padding = int(np.count_nonzero(slots["position"] == MISSING))
        return RowTable(slots=slots, layout=RowLayout.GIVEN, counts=RowCounts(padding=padding))

    def from_call(
        self, inputs: CallInputs, history: CacheHistory | None
    ) -> tuple[RowTable, CacheHistory | None]:
        """A call as read; also what its cache holds afterwards, where that is known."""
        if inputs.tokens_BT is None:
            return _unknown(inputs, "the root module got no token ids; name its rows with Rows"), None
        if inputs.unreadable:
            return _unknown(inputs, f"{inputs.unreadable}; name the rows with Rows"), None
        if inputs.cached:
            if history is None or history.length < inputs.cached or len(history.sequences_B) != inputs.batch:
                table = _unknown(inputs, "the cache was filled by calls that were not captured")
                counts = RowCounts(cached=inputs.batch * inputs.cached, unknown=inputs.batch * inputs.length)
                return RowTable(slots=table.slots, layout=table.layout, counts=counts, note=table.note), None
            return self._continue(inputs, history)
        segments_BT = packed_segments(inputs)
        if segments_BT is not None:
            return self._packed(inputs, segments_BT), None
        return self._padded(inputs)

    def _new_sequences(self, count: int) -> np.ndarray:
        first = self._num_sequences
        self._num_sequences += count
        return np.arange(first, self._num_sequences)

    def _before(self, request: Hashable, first: int, rows: Rows) -> tuple[int, np.ndarray | None, int]:
        """Sequence number, digest before position ``first`` (None: unknown), rows that a cache supplied."""
        known = self._requests.get(request)
        supplied = 0
        if known is None:
            prefix = np.asarray((rows.prefixes or {}).get(request, ()), dtype=np.int64)
            known = (int(self._new_sequences(1)[0]), list(prefix_digests(prefix)))
            self._requests[request] = known
            supplied = first if first else 0
        sequence, digests = known
        if first == 0:
            return sequence, EMPTY, supplied
        return sequence, digests[first - 1] if first <= len(digests) else None, supplied

    def _remember(self, request: Hashable, first: int, digests: np.ndarray) -> None:
        self._requests[request][1][first:] = list(digests)

    def _padded(self, inputs: CallInputs) -> tuple[RowTable, CacheHistory]:
        shape = (inputs.batch, inputs.length)
        real_BT = (
            np.ones(shape, dtype=bool) if inputs.mask_B is None else inputs.mask_B[:, -inputs.length :] != 0
        )
        history = CacheHistory(
            sequences_B=self._new_sequences(inputs.batch),
            counts_BL=np.zeros((inputs.batch, 0), dtype=np.int64),
            digests_BL=np.zeros((inputs.batch, 0, 2), dtype=np.uint64),
            ended_B=np.zeros(inputs.batch, dtype=bool),
        )
        return self._extend(inputs, history, real_BT, RowLayout.PADDED)

    def _continue(self, inputs: CallInputs, history: CacheHistory) -> tuple[RowTable, CacheHistory]:
        rewound = history.length - inputs.cached
        if rewound:
            history.counts_BL = history.counts_BL[:, : inputs.cached]
            history.digests_BL = history.digests_BL[:, : inputs.cached]
        shape = (inputs.batch, inputs.length)
        mask = inputs.mask_B
        readable = mask is not None and mask.shape[1] >= inputs.length
        real_BT = (
            mask[:, -inputs.length :] != 0 if readable and mask is not None else np.ones(shape, dtype=bool)
        )
        discarded_BT = real_BT & history.ended_B[:, None]
        table, history = self._extend(inputs, history, real_BT & ~discarded_BT, RowLayout.CACHED)
        discarded = int(np.count_nonzero(discarded_BT))
        if inputs.length == 1 and self._end_tokens.size and inputs.tokens_BT is not None:
            history.ended_B = history.ended_B | np.isin(inputs.tokens_BT[:, -1], self._end_tokens)
        counts = RowCounts(
            padding=table.counts.padding - discarded, discarded=discarded + rewound * inputs.batch
        )
        return RowTable(slots=table.slots, layout=table.layout, counts=counts), history

    def _extend(
        self, inputs: CallInputs, history: CacheHistory, real_BT: np.ndarray, layout: RowLayout
    ) -> tuple[RowTable, CacheHistory]:
        assert inputs.tokens_BT is not None
        before_B = (
            history.counts_BL[:, -1:] if history.length else np.zeros((inputs.batch, 1), dtype=np.int64)
        )
        digest_B = (
            history.digests_BL[:, -1:] if history.length else np.zeros((inputs.batch, 1, 2), dtype=np.uint64)
        )
        counts_BT = before_B + np.cumsum(real_BT, axis=1)
        words = token_words(inputs.tokens_BT.reshape(-1), (counts_BT - 1).reshape(-1) * real_BT.reshape(-1))
        words_BT = words.reshape(inputs.batch, inputs.length, 2) * real_BT[:, :, None].astype(np.uint64)
        digests_BT = digest_B + np.cumsum(words_BT, axis=1, dtype=np.uint64)
        slots = np.full((inputs.batch, inputs.length), BLANK)
        slots["digest"][real_BT] = digests_BT[real_BT]
        slots["sequence"] = np.where(real_BT, history.sequences_B[:, None], MISSING)
        slots["position"] = np.where(real_BT, counts_BT - 1, MISSING)
        slots["token"] = np.where(real_BT, inputs.tokens_BT, MISSING)
        grown = CacheHistory(
            sequences_B=history.sequences_B,
            counts_BL=np.concatenate([history.counts_BL, counts_BT], axis=1),
            digests_BL=np.concatenate([history.digests_BL, digests_BT], axis=1),
            ended_B=history.ended_B,
        )
        padding = int(real_BT.size - np.count_nonzero(real_BT))
        return RowTable(slots=slots.reshape(-1), layout=layout, counts=RowCounts(padding=padding)), grown

    def _packed(self, inputs: CallInputs, segments_BT: np.ndarray) -> RowTable:
        """Segments are numbered within the call, -1 for padding; each is one whole sequence."""
        assert inputs.tokens_BT is not None
        slots = np.full((inputs.batch, inputs.length), BLANK)
        for entry, segments_T in enumerate(segments_BT):
            edges = np.flatnonzero(np.diff(segments_T)) + 1
            for start, stop in zip([0, *edges], [*edges, inputs.length], strict=True):
                if segments_T[start] < 0:
                    continue
                part, tokens = slots[entry, start:stop], inputs.tokens_BT[entry, start:stop]
                part["digest"], part["sequence"] = prefix_digests(tokens), self._new_sequences(1)[0]
                part["position"], part["token"] = np.arange(stop - start), tokens
        padding = int(np.count_nonzero(segments_BT < 0))
        return RowTable(slots=slots.reshape(-1), layout=RowLayout.PACKED, counts=RowCounts(padding=padding))


def packed_segments(inputs: CallInputs) -> np.ndarray | None:
    """``[B, T]`` number of the packed sequence of each slot, -1 for padding; None where the batch is not packed."""
    shape = (inputs.batch, inputs.length)
    mask = None if inputs.mask_B is None else inputs.mask_B[:, -inputs.length :]
    if inputs.segment_starts is not None and inputs.batch == 1:
        segments_T = np.searchsorted(inputs.segment_starts, np.arange(inputs.length), side="right") - 1
        segments_T[segments_T >= len(inputs.segment_starts) - 1] = -1
        return segments_T[None]
    if mask is not None and mask.max(initial=0) > 1:
        return np.where(mask == 0, -1, mask)
    if inputs.positions_BT is None or (mask is not None and not mask.all()):
        return None
    positions_BT = np.broadcast_to(inputs.positions_BT, shape)
    starts_BT = positions_BT == 0
    steps_on = np.diff(positions_BT, axis=1) == 1
    if not starts_BT[:, 0].all() or not (steps_on | starts_BT[:, 1:]).all():
        return None
    if np.count_nonzero(starts_BT) == inputs.batch:
        return None
    return np.cumsum(starts_BT, axis=1) - 1


def is_decode(table: RowTable) -> bool:
    """True where every sequence goes on by one token."""
    if table.layout not in (RowLayout.CACHED, RowLayout.GIVEN):
        return False
    held = table.slots[table.slots["position"] >= 0]
    if not held.size:
        return table.layout is RowLayout.CACHED
    return bool(held["position"].min() > 0) and len(np.unique(held["sequence"])) == len(held)


def rows_to_keep(slots: np.ndarray, token_range: tuple[int, int] | None) -> np.ndarray | None:
    """Slots whose positions lie in the range (the last one excluded); None for all."""
    if token_range is None:
        return None
    return np.flatnonzero((slots["position"] >= token_range[0]) & (slots["position"] < token_range[1]))


def _unknown(inputs: CallInputs, note: str) -> RowTable:
    slots = np.full(inputs.batch * inputs.length, BLANK)
    return RowTable(slots=slots, layout=RowLayout.UNKNOWN, counts=RowCounts(unknown=len(slots)), note=note)
