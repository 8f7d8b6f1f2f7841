"""What vLLM computes with, as tensors: parameters where it reads them, packed copies where it reads those.

On a CPU vLLM packs the weight of every linear and of the head for its matrix product, and then uses the packed
copy alone: the parameter is emptied, or (the head's) kept and never read again. Such a weight is read back by
the product itself: the rows of the identity matrix go through the very function that the forward calls, and
row k of the result is column k of the weight. A product of one weight by 1, plus zeros, rounds nothing; only
the sign of zero is lost, and on some processors numbers below the normal range. So this reads bit for bit
what is used, whatever its layout. On a GPU the parameters are what is read.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase  # pyright: ignore[reportMissingImports]
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from trainfer.engines.vllm.layout import Source, is_head, sources
from trainfer.engines.vllm.pieces import Piece
from trainfer.exact.fingerprint import partial_fingerprint

_PROBE_ROWS = 256


def pieces(model: nn.Module) -> Iterator[Piece]:
    """This worker's part of every tensor; one module is read at a time."""
    dtype = next(model.parameters()).dtype
    for _, group in itertools.groupby(sources(model), key=lambda s: (id(s.module), s.attribute)):
        members = list(group)
        value = effective_tensor(members[0].module, members[0].attribute, dtype)
        yield from (_piece(source, value) for source in members)


def effective_tensor(module: nn.Module, attribute: str, dtype: torch.dtype) -> Tensor:
    """The weight or bias that the module's forward uses."""
    is_packed = current_platform.is_cpu() and (isinstance(module, LinearBase) or is_head(module))
    if is_packed and attribute == "weight":
        return _probe(module, dtype)
    value = module.get_parameter(attribute).detach()
    if value.dtype != dtype and torch.equal(value.to(dtype).to(value.dtype), value):
        return value.to(dtype)  # kept wider than it is, as some kernels want biases
    return value


def _probe(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight ``[outputs, inputs]``, column by column through the module's own matrix product."""
    inputs = module.embedding_dim if is_head(module) else _inputs(module)
    columns: list[Tensor] = []
    for begin in range(0, inputs, _PROBE_ROWS):
        count = min(_PROBE_ROWS, inputs - begin)
        rows = torch.zeros(count, inputs, dtype=dtype)
        rows[torch.arange(count), begin + torch.arange(count)] = 1
        with torch.no_grad():
            columns.append(module.quant_method.apply(module, rows, bias=None))
    return torch.cat(columns).t().contiguous()


def _inputs(module: Any) -> int:
    assert isinstance(module, LinearBase)
    return vars(module).get("input_size_per_partition", module.input_size)


def _piece(source: Source, value: Tensor) -> Piece:
    part = value[slice(*source.rows)] if value.dim() else value
    begin, end, left, right = source.region
    if part.numel() == torch.Size(source.shape).numel():
        whole = part.t() if source.transposed else part
    else:  # zeros add nothing to a fingerprint, so shards laid into zeros add up to the whole
        whole = part.new_zeros(source.shape[::-1] if source.transposed else source.shape)
        target = whole[begin:end] if whole.dim() == 1 else whole[begin:end, left:right]
        target.copy_(part)
        whole = whole.t() if source.transposed else whole
    first, second = partial_fingerprint(whole, 0).tolist()
    return Piece(
        name=source.name,
        shape=source.shape,
        region=source.region,
        dtype=part.dtype,
        sums=(first, second),
    )
