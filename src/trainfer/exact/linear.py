"""The matrix product of linear layers on a CPU in float32, by the library that keeps a row's bits and is faster.

Takes a model; lets its plain ``nn.Linear`` layers compute through oneDNN, forward and backward, where input and
weight are float32 on a CPU. Everything else (other dtypes, other devices, subclasses of ``nn.Linear``) computes
as before. Parameters, names and checkpoints do not change. Half precision on a CUDA device goes to ``exact.gpu_linear``.

Why: PyTorch's own choice there is MKL, whose order of summation changes below 4 rows a thread. oneDNN's does not
from 2 rows on, at any number of threads, so a row has the same bits alone (padded to a multiple of 2), in a
batch, in decode and in training. On processors for which MKL has no native kernels it also takes half the time.
``benchmarks/linear.py`` measures both.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfer.exact import gpu
from trainfer.exact.activation import route_activations


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias``; a gradient does not pass."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def packed_weight(weight: Tensor) -> Tensor:
    """A copy of a weight ``[out, in]`` in the order that oneDNN reads it, for ``packed_product``."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` by a packed weight, without gradient: the same bits, less time where rows are few."""
    return torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")


class _LinearFunction(torch.autograd.Function):
    """The product above with its gradients, each a product of the same kind."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = grad_outputs
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return (
            _product(flat, weight.t(), None).view_as(rows) if for_rows else None,
            _product(flat.t(), rows.reshape(-1, rows.shape[-1]).t(), None) if for_weight else None,
            flat.sum(0) if for_bias else None,
        )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias``.

    Args:
        rows: ``[..., in]``; at least 2 rows if equal bits matter.
        weight: ``[out, in]``.
        bias: ``[out]``.

    Returns:
        ``[..., out]``.
    """
    if rows.device.type == "cuda":
        return gpu.linear(rows, weight, bias)
    if rows.dtype is not torch.float32 or weight.dtype is not torch.float32 or rows.device.type != "cpu":
        return F.linear(rows, weight, bias)
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return _LinearFunction.apply(rows, weight, bias)
    return _product(rows, weight, bias)


class RoutedLinear(nn.Linear):
    """An ``nn.Linear`` that computes through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        return linear(input, self.weight, self.bias)


def route_linears(model: nn.Module) -> int:
    """Let every plain ``nn.Linear`` of ``model`` compute through ``linear``; returns how many do.

    The layer keeps its parameters, hooks and place; only its class changes, so copies, checkpoints and ``isinstance``
    tests work as before. Subclasses are left alone: they have a forward of their own. Where PyTorch was built without
    oneDNN nothing changes. SiLU modules go to ``activation.silu`` along with them.
    """
    route_activations(model)
    if not torch.backends.mkldnn.is_available():
        return 0
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    for module in plain:
        module.__class__ = RoutedLinear
    return len(plain)
