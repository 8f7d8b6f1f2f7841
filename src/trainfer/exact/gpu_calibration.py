"""What stands against exact mode on a CUDA device, beyond what the operators measure and route by themselves.

Takes a model's dtype and the attention forms that its layers ask for; gives (operator, detail) of each that no
row-invariant kernel computes. Linears are measured by ``calibration.linear_problems`` like on a CPU: those that
``exact.linear`` routes pass by ``gpu_linear``'s rule, others (convolutions over one position, quantised layers) show
themselves there.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from trainfer.exact import gpu
from trainfer.exact.attention import AttentionForm

HALF = (torch.bfloat16, torch.float16)
HEAD_SIZES = (16, 32, 64, 128, 256)
"""As in ``gpu_attention``, which cannot be imported without Triton."""


class Shape(Protocol):
    """One kind of attention layer."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def form(self) -> AttentionForm: ...  # noqa: D102
    @property
    def head_size(self) -> int: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102


def problems(shapes: Sequence[Shape]) -> Iterator[tuple[str, str]]:
    """Operator and detail of everything that stands against exact mode; at least one shape is given."""
    yield from kernel_problems(shapes[0].dtype)
    for shape in shapes:
        detail = attention_problem(shape.form, shape.head_size)
        if detail is not None:
            yield shape.name, detail


def kernel_problems(dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Of the whole model."""
    if not gpu.has_kernels():
        yield (
            "triton",
            "is not installed, so few rows cannot be multiplied in a fixed order; install PyTorch's CUDA build",
        )
    if dtype not in HALF:
        word = str(dtype).removeprefix("torch.")
        yield (
            f"every product in {word}",
            (
                f"{word} has no row-invariant kernels on a CUDA device; set actor.fsdp_config.mixed_precision.param_dtype and "
                "rollout.dtype to bfloat16"
            ),
        )


def attention_problem(form: AttentionForm, head_size: int) -> str | None:
    """Why a layer's attention is not computed row-invariantly; None where it is."""
    if form.softcap is not None:
        return "scores are soft-capped, which no row-invariant kernel computes on a CUDA device"
    if form.window is not None:
        return f"rows see a window of {form.window}, which no row-invariant kernel computes on a CUDA device"
    if head_size not in HEAD_SIZES:
        return f"heads of {head_size}; row-invariant kernels take {', '.join(map(str, HEAD_SIZES))}"
    return None
