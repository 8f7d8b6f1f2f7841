"""Which of a model's linears and activations give a row other bits among a few rows than among many, and how few may be few.

Takes a causal LM; gives a ``Problem`` for each kind of operator that fails at multiples of ``multiple`` rows, and the
smallest multiple at which none does. Part of ``calibration``, which tries ``packed.ROW_MULTIPLE``; a decode step, whose rows
are few, may do with less.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainfer.exact.attention import round_up
from trainfer.exact.packed import ROW_MULTIPLE, CausalModel, forward_logits, pack

_REFERENCE_FLOPS = 4e9
"""The reference product of a huge layer is kept below this; its row counts above that size are not tried."""
_ACTIVATIONS = frozenset({"act_fn", "act", "activation_fn", "activation"})
"""Names of the modules that hold an MLP's activation."""
_WIDTHS = 3
_PARALLEL_ELEMENTS = 1 << 16
"""Elements a thread: twice what PyTorch gives to one thread alone."""
DECODE_ROWS = (2, 4, ROW_MULTIPLE)
"""Tried for decode, in this order: a single row is a product with a vector, which libraries sum in another order."""
_FEW = (*range(1, 17), 21, 32, 43)
"""Numbers of rows tried for decode, in multiples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An operator whose result for a row depends on what else is there.

    Example: ``Problem(operator="linear 256 -> 768, float32", detail="8 rows differ from the same rows among 264")``.
    """

    operator: str
    detail: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.detail}"


def linear_problems(model: nn.Module, counts: Sequence[int] | None = None) -> Iterator[Problem]:
    """One for each kind of linear layer that fails: class, sizes, bias and dtype make a kind.

    Args:
        model: Its own layers are tried, by their own forward.
        counts: Numbers of rows, ascending; None: those of training.
    """
    tried = counts if counts is not None else (*range(ROW_MULTIPLE, 65, ROW_MULTIPLE), 96, 128, 200)
    seen: set[tuple[object, ...]] = set()
    for name, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        is_product = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if weight is None or not is_product:
            continue
        inner, outputs = weight.shape if type(module).__name__ == "Conv1D" else weight.shape[::-1]
        kind = (type(module), inner, outputs, "bias" in dict(module.named_parameters()), weight.dtype)
        if kind in seen:
            continue
        seen.add(kind)
        detail = _row_dependence(module, inner, outputs, weight, tried)
        if detail is not None:
            yield Problem(
                operator=f"{name} (linear {inner} -> {outputs}, {_word(weight.dtype)})", detail=detail
            )


def _row_dependence(
    module: nn.Module, inner: int, outputs: int, weight: Tensor, counts: Sequence[int]
) -> str | None:
    affordable = int(_REFERENCE_FLOPS / (2 * inner * outputs)) // ROW_MULTIPLE * ROW_MULTIPLE
    total = max(9 * ROW_MULTIPLE, min(counts[-1] + 8 * ROW_MULTIPLE, affordable))
    layer, rows = _cancelling(module, inner, outputs, weight, total)
    reference = layer(rows)
    for count in counts:
        if count > total - ROW_MULTIPLE:
            break
        for start in (0, ROW_MULTIPLE):
            if not torch.equal(layer(rows[:, start : start + count]), reference[:, start : start + count]):
                return f"{count} rows differ from the same rows among {total}"
    return None


def _cancelling(
    module: nn.Module, inner: int, outputs: int, weight: Tensor, total: int
) -> tuple[nn.Module, Tensor]:
    """The layer with other weights, and rows, whose products add up to zero.

    What comes out is the rounding of the sum alone, so another order of summation shows in nearly every element. Of
    ordinary sums in half precision it shows in one of thousands: the last rounding hides it.
    """
    half, order = inner // 2, torch.randperm(inner, device=weight.device)

    def paired(values: Tensor, sign: int) -> Tensor:
        rest = values.new_zeros((*values.shape[:-1], inner - 2 * half))
        return torch.cat([values, sign * values, rest], dim=-1)[..., order].to(weight.dtype)

    factors = paired(torch.randn(outputs, half, device=weight.device), -1)
    if type(module).__name__ == "Conv1D":
        factors = factors.t().contiguous()
    layer = copy.copy(module)
    layer._parameters = dict.fromkeys(module._parameters)
    for name, own in module.named_parameters(recurse=False):
        layer._parameters[name] = nn.Parameter(factors if name == "weight" else torch.zeros_like(own))
    return layer, paired(torch.randn(1, total, half, device=weight.device), 1)


def activation_problems(model: nn.Module, multiple: int = ROW_MULTIPLE) -> Iterator[Problem]:
    """Functions of single elements, which a library may compute by vectors here and one by one there."""
    kinds = {
        type(module): (name, module)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in _ACTIVATIONS and not list(module.parameters())
    }
    widths = {module.in_features for module in model.modules() if isinstance(module, nn.Linear)}
    dtype = next(model.parameters()).dtype
    for name, module in kinds.values():
        for width in sorted(widths)[:_WIDTHS]:
            total = max(32, round_up(_PARALLEL_ELEMENTS * torch.get_num_threads() // width, ROW_MULTIPLE))
            rows = torch.randn(1, total + multiple, width).to(dtype)
            reference = module(rows)
            for count in (multiple, 3 * multiple, total // 2 // multiple * multiple, total):
                if not torch.equal(module(rows[:, :count]), reference[:, :count]):
                    yield Problem(
                        operator=f"{name} ({type(module).__name__} of {width}, {_word(dtype)})",
                        detail=f"{count} rows differ from the same rows among {total + multiple} at "
                        f"{torch.get_num_threads()} threads; try another OMP_NUM_THREADS",
                    )
                    return


@torch.no_grad()
def decode_rows(model: nn.Module) -> int:
    """The smallest multiple of rows, at most ``ROW_MULTIPLE``, at which the whole model keeps a row's bits on this CPU."""
    return next((multiple for multiple in DECODE_ROWS[:-1] if _holds(model, multiple)), ROW_MULTIPLE)


def _holds(model: nn.Module, multiple: int) -> bool:
    counts = [multiple * few for few in _FEW]
    if any(True for _ in linear_problems(model, counts)) or any(
        True for _ in activation_problems(model, multiple)
    ):
        return False
    assert callable(model)
    runnable: CausalModel = model
    vocabulary = next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    sequences = [torch.randint(vocabulary, (count,)).tolist() for count in counts]
    together = pack(sequences, [1] * len(sequences), device="cpu")
    logits = forward_logits(runnable, together).split(list(together.response_lengths))
    return all(
        torch.equal(
            forward_logits(runnable, pack([sequence], [1], device="cpu", row_multiple=multiple)), expected
        )
        for sequence, expected in zip(sequences, logits, strict=True)
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
