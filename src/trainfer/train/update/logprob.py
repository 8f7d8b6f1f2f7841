"""Log-probs of responses under a model, without gradient: the old-log-prob and ref passes.

Takes sequences and a limit of what one forward may hold; gives one ``TokenScores`` per sequence in the
order given. Sequences are packed by token. The arithmetic is ``exact.logprobs``, which the builtin engine
samples with, so equal weights and rows give equal bits.

Axes: S scored rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfer.exact.logprobs import filtered_logprobs, filtered_rows, row_sampling
from trainfer.exact.packed import ROW_MULTIPLE, CausalModel, forward_logits, pack
from trainfer.exact.scores import forward_scores, scores_of_logits
from trainfer.exact.ulysses import SequenceShard, slice_rows, whole_rows
from trainfer.plan.packing import micro_batches, micro_batches_of_groups
from trainfer.types import SampledSequence, TokenScores


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardLimit:
    """Most that one forward on one rank may hold; exactly one field is given."""

    sequences: int | None = None
    tokens: int | None = None

    def split(
        self, lengths: Sequence[int], prompts: Sequence[Sequence[int]] | None = None
    ) -> list[list[int]]:
        """Indices of the sequences of each forward; with ``prompts`` equal ones stay together and are computed once."""
        if prompts is None:
            return micro_batches(lengths, max_sequences=self.sequences, max_tokens=self.tokens)
        return micro_batches_of_groups(
            lengths, [tuple(ids) for ids in prompts], max_sequences=self.sequences, max_tokens=self.tokens
        )


def rows_by_sequence(values: Sequence[float], lengths: Sequence[int]) -> list[tuple[float, ...]]:
    """Cut a flat list into one tuple per sequence."""
    rows: list[tuple[float, ...]] = []
    start = 0
    for length in lengths:
        rows.append(tuple(values[start : start + length]))
        start += length
    return rows


@torch.no_grad()
def score_sequences(
    model: CausalModel,
    sequences: Sequence[SampledSequence],
    *,
    limit: ForwardLimit,
    device: torch.device | str,
    micro_batches: Sequence[Sequence[int]] | None = None,
    shard: SequenceShard | None = None,
) -> list[TokenScores]:
    """Score every response token of every sequence.

    ``logprobs`` are under the sequence's temperature alone, ``sampled_logprobs`` under its filters too.

    Args:
        model: Scores.
        sequences: What is scored; at least one.
        limit: Of one forward.
        device: Where the tensors go.
        micro_batches: Indices of the sequences of each forward, where ranks must make equally many (an empty one is
            a forward that nobody reads). None: as few as ``limit`` allows.
        shard: This rank's place among those that share these sequences.
    """
    scores: dict[int, TokenScores] = {}
    if micro_batches is None:
        micro_batches = limit.split(
            [len(sequence.token_ids) for sequence in sequences],
            [sequence.prompt.token_ids for sequence in sequences],
        )
    for indices in micro_batches:
        members = [sequences[index] for index in indices] or [sequences[0]]
        scored = _score_micro_batch(model, members, device, shard)
        scores.update(zip(indices, scored, strict=bool(indices)))
    return [scores[index] for index in range(len(sequences))]


def _score_micro_batch(
    model: CausalModel,
    sequences: Sequence[SampledSequence],
    device: torch.device | str,
    shard: SequenceShard | None,
) -> list[TokenScores]:
    batch = pack(
        [sequence.token_ids for sequence in sequences],
        [len(sequence.prompt.token_ids) for sequence in sequences],
        device=device,
        row_multiple=ROW_MULTIPLE if shard is None else shard.row_multiple,
    )
    whole_lengths = batch.response_lengths
    sliced = None if shard is None else slice_rows(batch, shard)
    batch = batch if sliced is None else sliced.packed

    def by_sequence(values_S: Tensor) -> list[tuple[float, ...]]:
        if shard is not None and sliced is not None:
            values_S = whole_rows(values_S, sliced, shard)
        return rows_by_sequence(values_S.tolist(), whole_lengths)

    lengths = batch.response_lengths
    sampling = row_sampling([sequence.sampling for sequence in sequences], lengths, device=device)
    logits_SV = forward_logits(model, batch) if sampling.filters else None
    if logits_SV is None:
        logprobs_S, entropies_S = forward_scores(model, batch, sampling.temperatures_S)
    else:
        logprobs_S, entropies_S = scores_of_logits(logits_SV, batch.targets_S, sampling.temperatures_S)
    logprobs, entropies = by_sequence(logprobs_S), by_sequence(entropies_S)
    sampled = logprobs
    if logits_SV is not None:
        filtered_S = filtered_logprobs(logits_SV, batch.targets_S, sampling)
        sampled = by_sequence(torch.where(filtered_rows(sampling), filtered_S, logprobs_S))
    return [
        TokenScores(logprobs=plain, sampled_logprobs=filtered, entropies=entropy)
        for plain, filtered, entropy in zip(logprobs, sampled, entropies, strict=True)
    ]
