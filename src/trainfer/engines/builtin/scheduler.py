"""Which sequences run next, and in which cache blocks: integers in, integers out.

Prefill comes first, as many waiting sequences as fit; otherwise all running sequences decode one token.
When blocks run out, the youngest running sequence gives its own back and waits to be recomputed (prompt and
what it has sampled, in one prefill). Equal prompts are computed once: their blocks are held by a *prefix*
while members of the group have yet to start, every member shares them, and a block that others hold is
copied before it is written.

Leaves out: tensors, sampling, stop tokens (the engine says when a sequence is finished).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainfer.engines.builtin.blocks import BlockPool
from trainfer.engines.limits import EngineLimits


@dataclass(kw_only=True, slots=True, eq=False)
class Tracked:
    """A sequence on its way; compared by identity."""

    index: int
    """Place of its request in the call."""
    prompt_ids: tuple[int, ...]
    max_new_tokens: int | None = None
    """Blocks ahead of the last token are taken for no more than these; None where none are taken ahead."""
    sampled_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far; the last one has no cached key yet once something was sampled."""
        return len(self.prompt_ids) + len(self.sampled_ids)

    @property
    def last_token(self) -> int:
        """The token to be decoded next."""
        return self.sampled_ids[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPass:
    """Tokens to run through the model from position 0, and the blocks that take their keys."""

    key: int
    """Names the pass's last row of logits, which members of a group may need in later steps too."""
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """New passes, and the sequences that sample their next token now, each from the pass ``keys`` names."""

    passes: tuple[PrefillPass, ...]
    sequences: tuple[Tracked, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """Sequences that decode their last token, after ``copies`` of whole blocks (source, target)."""

    sequences: tuple[Tracked, ...]
    copies: tuple[tuple[int, int], ...]


@dataclass(kw_only=True, slots=True)
class _Prefix:
    """A prompt whose blocks are held for members that have yet to start."""

    key: int
    blocks: list[int]


class Scheduler:
    """State of one ``generate`` call."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        limits: EngineLimits,
        num_blocks: int,
        *,
        max_new_tokens: Sequence[int] | None = None,
        lookahead: int = 1,
    ) -> None:
        """Start with every sequence waiting.

        Args:
            prompts: Token ids of each.
            limits: See ``EngineLimits``.
            num_blocks: Of the cache.
            max_new_tokens: Of each sequence; wanted where ``lookahead`` is above 1.
            lookahead: Tokens that a decode step may draw for each sequence; their blocks are taken before it.
        """
        assert lookahead == 1 or max_new_tokens is not None
        self._limits = limits
        self._lookahead = lookahead
        self._pool = BlockPool(num_blocks)
        ends = max_new_tokens if max_new_tokens is not None else [None] * len(prompts)
        self._waiting = deque(
            Tracked(index=index, prompt_ids=ids, max_new_tokens=end)
            for index, (ids, end) in enumerate(zip(prompts, ends, strict=True))
        )
        self._running: list[Tracked] = []
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}
        self._unstarted = Counter(prompts)
        self._next_key = 0
        self.num_preemptions = 0

    @property
    def is_done(self) -> bool:
        """True when nothing waits or runs."""
        return not self._waiting and not self._running

    @property
    def live_keys(self) -> set[int]:
        """Passes whose logits later steps may ask for."""
        return {prefix.key for prefix in self._prefixes.values()}

    def next_step(self) -> PrefillStep | DecodeStep:
        """Decide; the caller runs the step, appends the sampled tokens, and reports who is finished."""
        step = self._prefill()
        if not step.sequences and not self._running:
            self._drop_prefixes()
            step = self._prefill()
            assert step.sequences, "the engine checks that every request fits the cache alone"
        return step if step.sequences else self._decode()

    def finish(self, sequence: Tracked) -> None:
        """Free what the sequence holds."""
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    def _prefill(self) -> PrefillStep:
        passes: list[PrefillPass] = []
        sequences: list[Tracked] = []
        keys: list[int] = []
        num_tokens = 0
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            prefix = self._prefixes.get(sequence.prompt_ids) if not sequence.sampled_ids else None
            if prefix is None:
                if passes and num_tokens + sequence.length > self._limits.max_num_batched_tokens:
                    break
                if not self._has_room(self._blocks_of(sequence.length)):
                    break
                passes.append(self._start(sequence))
                num_tokens += sequence.length
                keys.append(passes[-1].key)
            else:
                if not self._has_room(0):
                    break
                self._pool.share(prefix.blocks)
                sequence.blocks = list(prefix.blocks)
                keys.append(prefix.key)
            self._waiting.popleft()
            self._running.append(sequence)
            sequences.append(sequence)
            self._count_start(sequence)
        return PrefillStep(passes=tuple(passes), sequences=tuple(sequences), keys=tuple(keys))

    def _has_room(self, needed: int) -> bool:
        """Leave one block to grow into, unless nobody else runs (then finishing alone is what was checked)."""
        return self._pool.num_free >= needed + (1 if self._running else 0)

    def _start(self, sequence: Tracked) -> PrefillPass:
        key = self._next_key
        self._next_key += 1
        sequence.blocks = self._pool.allocate(self._blocks_of(sequence.length))
        is_first_of_many = not sequence.sampled_ids and self._unstarted[sequence.prompt_ids] > 1
        if is_first_of_many and self._limits.share_prefixes:
            self._pool.share(sequence.blocks)
            self._prefixes[sequence.prompt_ids] = _Prefix(key=key, blocks=list(sequence.blocks))
        return PrefillPass(
            key=key,
            token_ids=sequence.prompt_ids + tuple(sequence.sampled_ids),
            blocks=tuple(sequence.blocks),
        )

    def _count_start(self, sequence: Tracked) -> None:
        if sequence.sampled_ids:
            return
        self._unstarted[sequence.prompt_ids] -= 1
        if not self._unstarted[sequence.prompt_ids]:
            self._drop_prefix(sequence.prompt_ids)

    def _decode(self) -> DecodeStep:
        copies: list[tuple[int, int]] = []
        num_ready = 0
        while num_ready < len(self._running):  # the end of the list may be preempted meanwhile
            num_ready += self._make_writable(self._running[num_ready], copies)
        return DecodeStep(sequences=tuple(self._running), copies=tuple(copies))

    def _make_writable(self, sequence: Tracked, copies: list[tuple[int, int]]) -> bool:
        """See that the sequence alone holds the blocks of its last token and of those that the step draws after it.

        False when it was preempted itself.
        """
        first = last = sequence.length - 1
        if sequence.max_new_tokens is not None:  # the last token that it may draw is never fed
            end = len(sequence.prompt_ids) + sequence.max_new_tokens - 2
            last = max(first, min(first + self._lookahead - 1, end))
        size = self._limits.block_size
        return all(
            self._hold_alone(sequence, place, copies) for place in range(first // size, last // size + 1)
        )

    def _hold_alone(self, sequence: Tracked, place: int, copies: list[tuple[int, int]]) -> bool:
        while True:
            is_new = place == len(sequence.blocks)
            if not is_new and not self._pool.is_shared(sequence.blocks[place]):
                return True
            if self._pool.num_free:
                break
            if not self._free_something(sequence):
                return False
        block = self._pool.allocate(1)[0]
        if is_new:
            sequence.blocks.append(block)
        else:
            copies.append((sequence.blocks[place], block))
            self._pool.release([sequence.blocks[place]])
            sequence.blocks[place] = block
        return True

    def _free_something(self, sequence: Tracked) -> bool:
        """Give up prefixes, then the youngest running sequence; False when that was ``sequence``."""
        if self._prefixes:
            self._drop_prefixes()
            return True
        victim = self._running.pop()
        self._pool.release(victim.blocks)
        victim.blocks = []
        self._waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim is not sequence

    def _drop_prefixes(self) -> None:
        for prompt_ids in tuple(self._prefixes):
            self._drop_prefix(prompt_ids)

    def _drop_prefix(self, prompt_ids: tuple[int, ...]) -> None:
        prefix = self._prefixes.pop(prompt_ids, None)
        if prefix is not None:
            self._pool.release(prefix.blocks)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)
