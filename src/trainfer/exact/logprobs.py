"""Log-probs, entropies and sampling filters; the trainer and every in-process engine call these.

Takes logits ``[S, V]`` of any float dtype; computes in float32; gives ``[S]`` or ``[S, V]`` float32.
Draws nothing: see the engines. All functions treat each row alone.

Temperature 0 (greedy) draws from no distribution; its log-probs are those under temperature 1 without
filters, which is what vLLM and Transformers report.

Axes: S scored rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainfer.types import SamplingParams


class RowScores(NamedTuple):
    """Of each row of logits, ``[S]`` float32."""

    logprobs_S: Tensor
    entropies_S: Tensor
    normalisers_S: Tensor
    """logsumexp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSampling:
    """The sampling parameters of each row.

    Example: two sequences with 3 and 1 response tokens at temperatures 1.0 and 0.5 give
    ``temperatures_S = [1.0, 1.0, 1.0, 0.5]``.
    """

    temperatures_S: Tensor
    """float32."""
    top_ks_S: Tensor
    """int64; -1 is no filter."""
    top_ps_S: Tensor
    """float64."""
    min_ps_S: Tensor
    """float32."""
    filters: bool
    """True when some row is filtered."""
    greedy: bool
    """True when some row has temperature 0."""


def row_sampling(
    params: Sequence[SamplingParams], rows: Sequence[int], *, device: torch.device | str
) -> RowSampling:
    """Parameters of sequences, each repeated for its ``rows``."""
    repeats = torch.tensor(rows, dtype=torch.int64)

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(repeats).to(device)

    return RowSampling(
        temperatures_S=column([item.temperature for item in params], torch.float32),
        top_ks_S=column([item.top_k for item in params], torch.int64),
        top_ps_S=column([item.top_p for item in params], torch.float64),
        min_ps_S=column([item.min_p for item in params], torch.float32),
        filters=any(item.filters and item.temperature > 0 for item in params),
        greedy=any(item.temperature == 0 for item in params),
    )


def filtered_rows(sampling: RowSampling) -> Tensor:
    """Which rows are drawn from a part of the vocabulary, ``[S]`` bool."""
    filters_S = (sampling.top_ks_S > 0) | (sampling.top_ps_S < 1.0) | (sampling.min_ps_S > 0)
    return filters_S & (sampling.temperatures_S > 0)


def log_distribution(logits_SV: Tensor, temperatures_S: Tensor) -> Tensor:
    """``log_softmax(logits / temperature)`` in float32, ``[S, V]``; temperature 0 counts as 1."""
    if temperatures_S.device.type == "cpu" and bool((temperatures_S == 1.0).all()):
        return torch.log_softmax(logits_SV.float(), dim=-1)  # dividing by 1 changes no bit, and costs a pass
    temperatures_S = torch.where(temperatures_S > 0, temperatures_S, 1.0).to(torch.float32)
    return torch.log_softmax(logits_SV.float() / temperatures_S[:, None], dim=-1)


def _pick(values_SV: Tensor, tokens_S: Tensor) -> Tensor:
    return values_SV.gather(1, tokens_S[:, None])[:, 0]


def token_logprobs(logits_SV: Tensor, targets_S: Tensor, temperatures_S: Tensor) -> Tensor:
    """Log-prob of each row's target under its temperature, no filter, ``[S]`` float32."""
    return _pick(log_distribution(logits_SV, temperatures_S), targets_S)


def entropies(logits_SV: Tensor, temperatures_S: Tensor) -> Tensor:
    """Entropy in nats of each row's distribution under its temperature, ``[S]`` float32."""
    return row_entropies(log_distribution(logits_SV, temperatures_S))


def row_entropies(logprobs_SV: Tensor) -> Tensor:
    """Entropy in nats of each row of a log-softmax, ``[S]``."""
    return -(logprobs_SV.exp() * logprobs_SV).sum(dim=-1)


def filtered_logprobs(logits_SV: Tensor, targets_S: Tensor, sampling: RowSampling) -> Tensor:
    """Log-prob of each target under temperature and filters, survivors renormalised, ``[S]`` float32.

    The target was sampled, so it is never filtered out, even where rounding puts it beyond the edge here.
    """
    logprobs_SV = log_distribution(logits_SV, sampling.temperatures_S)
    if not sampling.filters:
        return _pick(logprobs_SV, targets_S)
    keep_SV = kept_tokens(logprobs_SV, sampling).scatter(1, targets_S[:, None], value=True)
    return _pick(renormalise(logprobs_SV, keep_SV), targets_S)


def renormalise(logprobs_SV: Tensor, keep_SV: Tensor) -> Tensor:
    """Log-probs of the kept tokens among themselves; -inf elsewhere.

    Rows that keep every token come out bit for bit as they went in.
    """
    kept_SV = torch.log_softmax(logprobs_SV.masked_fill(~keep_SV, float("-inf")), dim=-1)
    return torch.where(keep_SV.all(dim=-1, keepdim=True), logprobs_SV, kept_SV)


def kept_tokens(logprobs_SV: Tensor, sampling: RowSampling) -> Tensor:
    """Which tokens can be drawn, ``[S, V]`` bool.

    Order: top-k, then top-p on what top-k left (renormalised), then min-p relative to the likeliest token.

    - top-k keeps the k likeliest tokens, and all that tie with the k-th.
    - top-p keeps a token while the mass of the tokens before it, likeliest first, is below ``top_p``, and
      all that tie with the last one kept. The likeliest token always stays.
    - min-p keeps tokens with probability at least ``min_p`` times the largest.

    Ties are kept together, so that the answer depends on values alone, never on a sort's order.
    """
    sorted_SV = logprobs_SV.detach().sort(dim=-1, descending=True).values
    vocabulary = logprobs_SV.shape[-1]
    unlimited_S = (sampling.top_ks_S < 1) | (sampling.top_ks_S > vocabulary)
    top_ks_S = torch.where(unlimited_S, vocabulary, sampling.top_ks_S)
    kth_S1 = sorted_SV.gather(1, top_ks_S[:, None] - 1)
    probs_SV = sorted_SV.masked_fill(sorted_SV < kth_S1, float("-inf")).double().softmax(dim=-1)
    mass_before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    unfiltered_S1 = (sampling.top_ps_S >= 1.0)[:, None]
    in_nucleus_SV = (mass_before_SV < sampling.top_ps_S[:, None]) | unfiltered_S1
    in_nucleus_SV[:, 0] = True
    last_S1 = sorted_SV.masked_fill(~in_nucleus_SV, float("inf")).amin(dim=-1, keepdim=True)
    floor_S1 = sorted_SV[:, :1] + sampling.min_ps_S.log()[:, None]
    keep_SV = (logprobs_SV >= kth_S1) & (logprobs_SV >= last_S1) & (logprobs_SV >= floor_S1)
    return keep_SV | (sampling.temperatures_S <= 0)[:, None]
