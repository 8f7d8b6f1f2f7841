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

from trainfer.exact.logprobs import filtered_logprobs, log_distribution, row_sampling
from trainfer.exact.packed import CausalModel, forward_logits, pack
from trainfer.plan.packing import micro_batches
from trainfer.types import SampledSequence, TokenScores


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardLimit:
    """Most that one forward on one rank may hold; exactly one field is given."""

    sequences: int | None = None
    tokens: int | None = None

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each forward."""
        return micro_batches(lengths, max_sequences=self.sequences, max_tokens=self.tokens)


def row_entropies(logprobs_SV: Tensor) -> Tensor:
    """Entropy in nats of each row of a log-softmax, ``[S]``."""
    return -(logprobs_SV.exp() * logprobs_SV).sum(dim=-1)


def pick(logprobs_SV: Tensor, targets_S: Tensor) -> Tensor:
    """The log-prob of each row's target, ``[S]``."""
    return logprobs_SV.gather(1, targets_S[:, None])[:, 0]


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
) -> list[TokenScores]:
    """Score every response token of every sequence.

    ``logprobs`` are under the sequence's temperature alone, ``sampled_logprobs`` under its filters too.
    """
    scores: dict[int, TokenScores] = {}
    for indices in limit.split([len(sequence.token_ids) for sequence in sequences]):
        members = [sequences[index] for index in indices]
        scores.update(zip(indices, _score_micro_batch(model, members, device), strict=True))
    return [scores[index] for index in range(len(sequences))]


def _score_micro_batch(
    model: CausalModel, sequences: Sequence[SampledSequence], device: torch.device | str
) -> list[TokenScores]:
    batch = pack(
        [sequence.token_ids for sequence in sequences],
        [len(sequence.prompt.token_ids) for sequence in sequences],
        device=device,
    )
    lengths = batch.response_lengths
    sampling = row_sampling([sequence.sampling for sequence in sequences], lengths, device=device)
    logits_SV = forward_logits(model, batch)
    logprobs_SV = log_distribution(logits_SV, sampling.temperatures_S)
    logprobs = rows_by_sequence(pick(logprobs_SV, batch.targets_S).tolist(), lengths)
    entropies = rows_by_sequence(row_entropies(logprobs_SV).tolist(), lengths)
    sampled = logprobs
    if sampling.filters:
        sampled = rows_by_sequence(filtered_logprobs(logits_SV, batch.targets_S, sampling).tolist(), lengths)
    return [
        TokenScores(logprobs=plain, sampled_logprobs=filtered, entropies=entropy)
        for plain, filtered, entropy in zip(logprobs, sampled, entropies, strict=True)
    ]
