"""Which sequences go to which rank, and which of a rank's sequences share a forward pass.

Takes token counts, gives lists of indices into them. Deterministic: equal input, equal output,
ties broken by the smaller index. It moves no data and knows nothing of groups or weights.

Axes: N sequences, R ranks.
"""

import heapq
from collections.abc import Hashable, Sequence

from trainfer.errors import PlanError

_Part = tuple[int, list[int]]
"""Tokens and indices of one rank (or micro-batch) so far."""


def micro_batches(
    lengths: Sequence[int],
    *,
    max_sequences: int | None,
    max_tokens: int | None,
    at_least: int = 1,
) -> list[list[int]]:
    """Split sequences into micro-batches, as few as the limit allows and of even token counts.

    Args:
        lengths: Tokens per sequence, ``[N]``.
        max_sequences: Most sequences of one micro-batch; counts then differ by at most one.
        max_tokens: Most tokens of one micro-batch. Exactly one of the two limits is given.
        at_least: Fewest micro-batches wanted, at most N: ranks that meet in collectives need
            equal numbers of forward passes.

    Returns:
        Indices per micro-batch, ascending; every index once; no micro-batch is empty.

    Raises:
        PlanError: a sequence is longer than ``max_tokens``, or there are fewer sequences than ``at_least``.
    """
    if (max_sequences is None) == (max_tokens is None):
        raise ValueError("give exactly one of max_sequences and max_tokens")
    if not lengths:
        return []
    if at_least > len(lengths):
        raise PlanError(
            f"{len(lengths)} sequences cannot fill {at_least} micro-batches; every one needs a sequence."
        )
    if max_sequences is not None:
        if max_sequences < 1:
            raise PlanError(f"a micro-batch of {max_sequences} sequences is none; set at least 1.")
        return balance(lengths, max(at_least, -(-len(lengths) // max_sequences)))
    if max_tokens is None or max_tokens < 1:
        raise PlanError(f"a micro-batch of {max_tokens} tokens is none; set at least 1.")
    return _under_token_budget(lengths, max_tokens=max_tokens, at_least=at_least)


def micro_batches_of_groups(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    *,
    max_sequences: int | None,
    max_tokens: int | None,
) -> list[list[int]]:
    """As many micro-batches as ``micro_batches`` makes, with the sequences of a group side by side.

    A forward computes a prompt once for all its sequences, so a group that is spread over micro-batches costs more.
    Groups come in the order of their first sequences and are cut only where a limit asks for it; where that would take
    more micro-batches under a token budget, the answer is that of ``micro_batches``.

    Args:
        lengths: Tokens per sequence, ``[N]``.
        groups: Whose group each sequence is.
        max_sequences: See ``micro_batches``.
        max_tokens: See ``micro_batches``; shared prompts count once per sequence.
    """
    even = micro_batches(lengths, max_sequences=max_sequences, max_tokens=max_tokens)
    firsts: dict[Hashable, int] = {}
    for index, group in enumerate(groups):
        firsts.setdefault(group, index)
    order = sorted(range(len(lengths)), key=lambda index: (firsts[groups[index]], index))
    if max_tokens is None:
        sizes = [len(order) // len(even) + (part < len(order) % len(even)) for part in range(len(even))]
        ends = [sum(sizes[: part + 1]) for part in range(len(sizes))]
        return _in_order([order[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    together: list[list[int]] = []
    tokens = max_tokens
    for index in order:
        if tokens + lengths[index] > max_tokens:
            together.append([])
            tokens = 0
        together[-1].append(index)
        tokens += lengths[index]
    return _in_order(together) if len(together) <= len(even) else even


def balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal sequences to ranks: equal counts, token sums as even as the differencing method makes them.

    Counts are equal where N is a multiple of R and differ by at most one elsewhere. Method:
    Karmarkar and Karp's largest differencing method with equal cardinalities: slices of R
    sequences of like length are merged, always the two most uneven, largest part to smallest.

    Returns:
        Indices per rank, ascending; ranks with sequences are ordered by their first index.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; at least 1 is needed")
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    slices: list[tuple[int, int, list[_Part]]] = []
    for number, start in enumerate(range(0, len(by_length), num_ranks)):
        parts: list[_Part] = [(lengths[index], [index]) for index in by_length[start : start + num_ranks]]
        parts += [(0, [])] * (num_ranks - len(parts))
        slices.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(slices)
    next_number = len(slices)
    while len(slices) > 1:
        _, _, first = heapq.heappop(slices)
        _, _, second = heapq.heappop(slices)
        merged = [
            (a_tokens + b_tokens, a_indices + b_indices)
            for (a_tokens, a_indices), (b_tokens, b_indices) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(slices, (merged[-1][0] - merged[0][0], next_number, merged))
        next_number += 1
    parts = slices[0][2] if slices else [(0, [])] * num_ranks
    return _in_order([indices for _, indices in parts])


def _under_token_budget(lengths: Sequence[int], *, max_tokens: int, at_least: int) -> list[list[int]]:
    longest = max(lengths)
    if longest > max_tokens:
        raise PlanError(
            f"a sequence of {longest} tokens does not fit a micro-batch of {max_tokens} tokens; "
            f"raise the token budget to at least {longest}."
        )
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    packed = _first_fit(lengths, by_length, max_tokens)
    fewest = max(at_least, -(-sum(lengths) // max_tokens), 1)
    for count in range(fewest, max(at_least, len(packed)) + 1):
        even = _evenly(lengths, by_length, count)
        if all(tokens <= max_tokens for tokens, _ in even):
            return _in_order([indices for _, indices in even])
    while len(packed) < at_least:
        most = max(packed, key=lambda indices: (len(indices), -indices[0]))
        packed.remove(most)
        packed += [most[::2], most[1::2]]
    return _in_order(packed)


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit decreasing: at most 11/9 of the fewest micro-batches, plus one."""
    tokens_left: list[int] = []
    bins: list[list[int]] = []
    for index in order:
        for position, left in enumerate(tokens_left):
            if lengths[index] <= left:
                tokens_left[position] = left - lengths[index]
                bins[position].append(index)
                break
        else:
            tokens_left.append(max_tokens - lengths[index])
            bins.append([index])
    return bins


def _evenly(lengths: Sequence[int], order: Sequence[int], count: int) -> list[_Part]:
    """Longest sequence first, each to the part with the fewest tokens (then fewest sequences)."""
    heap: list[tuple[int, int, int, list[int]]] = [(0, 0, number, []) for number in range(count)]
    for index in order:
        tokens, size, number, indices = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[index], size + 1, number, [*indices, index]))
    return [(tokens, indices) for tokens, _, _, indices in heap]


def _in_order(parts: list[list[int]]) -> list[list[int]]:
    """Indices ascending in each part; parts by their first index; empty parts last."""
    return sorted((sorted(part) for part in parts), key=lambda part: (not part, part))
