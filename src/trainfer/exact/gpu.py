"""The door to the CUDA operators: asks for Triton, and imports their files, only where a CUDA device is used.

Takes and gives what ``gpu_linear``, ``gpu_norm``, ``gpu_plan`` and ``gpu_scores`` do. Where PyTorch was installed without Triton the
library's operators compute alone, which is right but not row-invariant; ``has_kernels`` says so.
"""

import functools
import importlib.util
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfer.exact.attention import AttentionPlan
from trainfer.exact.layout import RowLayout
from trainfer.exact.logprobs import RowScores
from trainfer.exact.plan import plan_layout


@functools.cache
def has_kernels() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def computes(rows: Tensor) -> bool:
    """Whether the CUDA operators take these rows."""
    return rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16) and has_kernels()


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias``."""
    if not computes(rows):
        return F.linear(rows, weight, bias)
    from trainfer.exact import gpu_linear

    return gpu_linear.linear(rows, weight, bias)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``gpu_norm``; the caller has asked ``computes``."""
    from trainfer.exact import gpu_norm

    return gpu_norm.rms_norm(rows, weight, eps)


def plan(layout: RowLayout, *, device: torch.device | str, row_multiple: int) -> AttentionPlan:
    """The attention plan of a layout on a CUDA device."""
    if not has_kernels():
        return plan_layout(layout, device=device, row_multiple=row_multiple)
    from trainfer.exact import gpu_plan

    return gpu_plan.gpu_plan(layout, device=device, row_multiple=row_multiple)


def row_scores(logits_SV: Tensor, targets_S: Tensor, temperatures_S: Tensor) -> RowScores:
    """See ``gpu_scores``; the caller has asked ``computes``."""
    from trainfer.exact import gpu_scores

    return gpu_scores.row_scores(logits_SV, targets_S, temperatures_S)


def logits_to_gradient_(
    logits_SV: Tensor,
    targets_S: Tensor,
    temperatures_S: Tensor,
    scores: RowScores,
    gradients: tuple[Tensor, Tensor],
) -> Tensor:
    """See ``gpu_scores``; ``gradients`` are those of log-probs and entropies."""
    from trainfer.exact import gpu_scores

    return gpu_scores.logits_to_gradient_(logits_SV, targets_S, temperatures_S, scores, gradients)


def fingerprint_sums(bits: Tensor, column_weights: Tensor, row_weights: Tensor, start: int) -> Tensor:
    """See ``gpu_fingerprint``."""
    from trainfer.exact import gpu_fingerprint

    return gpu_fingerprint.sums(bits, column_weights, row_weights, start)


def rotate(query_THK: Tensor, key_TGK: Tensor, cosines_TK: Tensor, sines_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See ``gpu_rows``; the caller has asked ``computes``."""
    from trainfer.exact import gpu_rows

    return gpu_rows.rotate(query_THK, key_TGK, cosines_TK, sines_TK)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """See ``gpu_rows``; the caller has asked ``computes``."""
    from trainfer.exact import gpu_rows

    return gpu_rows.silu_product(gate, up)


def fingerprint_many(bits: Sequence[Tensor], column_weights: Tensor, row_weights: Tensor) -> Tensor:
    """See ``gpu_fingerprint``."""
    from trainfer.exact import gpu_fingerprint

    return gpu_fingerprint.many(bits, column_weights, row_weights)
