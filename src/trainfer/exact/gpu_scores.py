"""Log-probs and entropies from logits on a CUDA device in one reading of each row (Triton).

Takes logits ``[S, V]`` in any float dtype; gives ``[S]`` float32. The arithmetic of a row is fixed: blocks of the
vocabulary in order, a running maximum and running sums in float32; so trainer and engine, which both call it, get the
same bits for a row in any batch. The backward writes the gradient of the logits in one pass.

    logprob = z_t - logsumexp(z),  entropy = logsumexp(z) - sum(softmax(z) * z),  z = logits / temperature

Axes: S scored rows, V vocabulary.
"""

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from trainfer.exact.logprobs import RowScores

jit = cast(Any, triton.jit)

_BLOCK = 4096
_WARPS = 8


@jit
def _forward_kernel(
    logits, row_stride, targets, temperatures, logprobs, entropies, normalisers, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    start = logits + row * row_stride
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in tl.range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < vocabulary
        scaled = tl.div_rn(tl.load(start + column, mask=mask, other=0.0).to(tl.float32), temperature)
        new_peak = tl.maximum(peak, tl.max(tl.where(mask, scaled, float("-inf")), 0))
        shrink = tl.exp(peak - new_peak)
        weights = tl.where(mask, tl.exp(scaled - new_peak), 0.0)
        total = tl.fma(total, shrink, tl.sum(weights, 0))
        weighted = tl.fma(weighted, shrink, tl.sum(weights * scaled, 0))
        peak = new_peak
    normaliser = peak + tl.log(total)
    target = tl.load(targets + row)
    chosen = tl.div_rn(tl.load(start + target).to(tl.float32), temperature)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(entropies + row, normaliser - weighted / total)
    tl.store(normalisers + row, normaliser)


@jit
def _backward_kernel(
    logits, row_stride, targets, temperatures, normalisers, entropies, logprob_gradients, entropy_gradients,
    vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocabulary
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    at = logits + row * row_stride + column
    value = tl.load(at, mask=mask, other=0.0)
    logprob = value.to(tl.float32) / temperature - tl.load(normalisers + row)
    weight = tl.exp(logprob)
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    gradient = tl.load(logprob_gradients + row) * (hit - weight)
    gradient -= tl.load(entropy_gradients + row) * weight * (logprob + tl.load(entropies + row))
    tl.store(at, (gradient / temperature).to(value.dtype), mask=mask)


def row_scores(logits_SV: Tensor, targets_S: Tensor, temperatures_S: Tensor) -> RowScores:
    """Log-prob of each row's target, entropy in nats, and logsumexp; no gradient.

    Args:
        logits_SV: Innermost axis dense.
        targets_S: int64.
        temperatures_S: float32; 0 counts as 1.
    """
    rows, vocabulary = logits_SV.shape
    assert logits_SV.stride(1) == 1
    out = torch.empty(3, rows, dtype=torch.float32, device=logits_SV.device)
    if rows:
        _forward_kernel[(rows,)](
            logits_SV, logits_SV.stride(0), targets_S, temperatures_S, out[0], out[1], out[2], vocabulary,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return RowScores(out[0], out[1], out[2])


def logits_to_gradient_(
    logits_SV: Tensor,
    targets_S: Tensor,
    temperatures_S: Tensor,
    scores: RowScores,
    gradients: tuple[Tensor, Tensor],
) -> Tensor:
    """Overwrite logits by the gradient of the loss, given those of log-probs and entropies (dense).

    With p = softmax(z), H its entropy: dlogprob/dz_j = [j = t] - p_j, dH/dz_j = -p_j (log p_j + H).
    """
    rows, vocabulary = logits_SV.shape
    assert logits_SV.stride(1) == 1
    if rows:
        _backward_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
            logits_SV, logits_SV.stride(0), targets_S, temperatures_S, scores.normalisers_S, scores.entropies_S,
            *gradients, vocabulary, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return logits_SV
