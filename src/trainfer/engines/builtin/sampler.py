"""Draws tokens: temperature, top-k, top-p, min-p; greedy at temperature 0.

Takes logits ``[B, V]`` and one uniform number a row; gives tokens and the log-prob of each under the
distribution that it was drawn from, by the very functions that the trainer scores with. The draw inverts the
cumulative distribution. The uniform of a sequence's i-th response token is a hash of (seed, i) alone, so that
what is sampled depends neither on the batch, the slot, the order of requests, nor on preemption.

Axes: B rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainfer.exact import gpu
from trainfer.exact.logprobs import RowSampling, filtered_rows, kept_tokens, log_distribution, renormalise

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FLAT_VOCABULARY = 8192
"""Up to here one running sum over the vocabulary costs less than two levels."""
_CHUNK = 128
"""Tokens of a chunk on the lower level."""
_MANTISSA_SHIFT = 12
"""52 random bits: the largest uniform times any sum then stays below that sum in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Tokens and their log-probs."""

    tokens_B: Tensor
    """int64."""
    logprobs_B: Tensor
    """float32."""


def uniforms(seed: int, count: int) -> list[float]:
    """The first ``count`` uniform numbers in [0, 1) of a seed (its low 64 bits): splitmix64 of (seed, index).

    The seed is hashed first, so that neighbouring seeds share no numbers.
    """
    start = int(_splitmix(numpy.array([seed & _MASK], dtype=numpy.uint64))[0])
    counter = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(_GOLDEN) + numpy.uint64(start)
    bits = _splitmix(counter) >> numpy.uint64(_MANTISSA_SHIFT)
    return (bits.astype(numpy.float64) * 2.0 ** -(64 - _MANTISSA_SHIFT)).tolist()


def _splitmix(value: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014); multiplication wraps."""
    value = (value ^ (value >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return value ^ (value >> numpy.uint64(31))


def draw(logits_BV: Tensor, uniforms_B: Tensor, sampling: RowSampling) -> Draw:
    """Draw one token a row.

    Args:
        logits_BV: Any float dtype.
        uniforms_B: float64 in [0, 1).
        sampling: Parameters of each row.
    """
    logprobs_BV = log_distribution(logits_BV, sampling.temperatures_S)
    if sampling.filters:
        logprobs_BV = renormalise(logprobs_BV, kept_tokens(logprobs_BV, sampling))
    tokens_B1 = _invert(logprobs_BV, uniforms_B)
    if sampling.greedy:
        is_greedy_B1 = (sampling.temperatures_S <= 0)[:, None]
        tokens_B1 = torch.where(is_greedy_B1, logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
    logprobs_B = logprobs_BV.gather(1, tokens_B1)[:, 0]
    if gpu.computes(logits_BV):  # by the trainer's kernel, whose sums run in another order
        plain_B = gpu.row_scores(logits_BV, tokens_B1[:, 0], sampling.temperatures_S).logprobs_S
        logprobs_B = (
            torch.where(filtered_rows(sampling), logprobs_B, plain_B) if sampling.filters else plain_B
        )
    return Draw(tokens_B=tokens_B1[:, 0], logprobs_B=logprobs_B)


def _invert(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """``[B, 1]``: the first token whose cumulative probability exceeds the uniform.

    One of probability 0 never is. Sums are float64. A row that is not a number gives some token; its log-prob
    tells.
    """
    if logprobs_BV.shape[-1] > _FLAT_VOCABULARY:
        return _invert_in_chunks(logprobs_BV, uniforms_B)
    ends_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    tokens_B1 = torch.searchsorted(ends_BV, uniforms_B[:, None] * ends_BV[:, -1:], right=True)
    return tokens_B1.clamp_(max=logprobs_BV.shape[-1] - 1)


def _invert_in_chunks(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The same in two levels, chunks and then tokens of one chunk: a long running sum is slow, being sequential."""
    padding = -logprobs_BV.shape[-1] % _CHUNK
    probs_BV = F.pad(logprobs_BV.exp(), (0, padding)) if padding else logprobs_BV.exp()
    probs_BCK = probs_BV.unflatten(-1, (-1, _CHUNK))
    chunk_ends_BC = probs_BCK.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_B1 = uniforms_B[:, None] * chunk_ends_BC[:, -1:]
    chunk_B1 = torch.searchsorted(chunk_ends_BC, target_B1, right=True).clamp_(
        max=chunk_ends_BC.shape[-1] - 1
    )
    before_B1 = torch.where(chunk_B1 > 0, chunk_ends_BC.gather(1, (chunk_B1 - 1).clamp_(min=0)), 0.0)
    inside_B1K = probs_BCK.gather(1, chunk_B1[:, :, None].expand(-1, -1, _CHUNK))
    ends_BK = inside_B1K[:, 0].cumsum(dim=-1, dtype=torch.float64)
    # The two sums of a chunk may differ in their last bit: stay below the inner one, so that a token is found.
    below = torch.nextafter(ends_BK[:, -1:], torch.zeros_like(before_B1))
    within_B1 = torch.searchsorted(ends_BK, torch.minimum(target_B1 - before_B1, below), right=True)
    return (chunk_B1 * _CHUNK + within_B1).clamp_(max=logprobs_BV.shape[-1] - 1)
