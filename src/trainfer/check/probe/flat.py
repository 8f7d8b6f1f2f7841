"""The parameters inside FSDP1's flat ones: name, shape, and the fingerprint of this rank's elements.

FSDP1 keeps a unit's parameters end to end in one flat tensor, cut anywhere among its ranks. Fingerprints add up over
ranges of elements, so each rank's sums over its range of a parameter add up to that of the whole.
"""
# pyright: standard
# (FSDP1's flat parameters have no public interface)

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from trainfer.check.probe.names import inner_name
from trainfer.exact.fingerprint import fingerprint_text, partial_fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPiece:
    """This rank's elements of one original parameter."""

    name: str
    dtype: torch.dtype
    """That it is computed with: mixed precision's, where the unit has one."""
    shape: tuple[int, ...]
    fingerprint: str
    parts: tuple[tuple[int, int, int], ...]
    """((0, rank, ranks),) where ranks share it; empty where each has the whole."""
    requires_grad: bool
    tied_to: str | None


def flat_ids(model: nn.Module) -> set[int]:
    """Ids of the parameters that ``flat_pieces`` stands for: flat ones, and views into them."""
    found: set[int] = set()
    for _, handle in _handles(model):
        found.add(id(handle.flat_param))
        found.update(id(view) for view in handle.flat_param._params or ())
    return found


def flat_pieces(model: nn.Module) -> Iterator[FlatPiece]:
    """Every parameter of every FSDP1 unit, in the order of definition within it; tied ones under each name."""
    for unit, handle in _handles(model):
        flat = handle.flat_param
        dtype = handle._fwd_bwd_param_dtype if handle._uses_param_mixed_precision else flat.dtype
        parts = ((0, handle.rank, handle.world_size),) if handle.uses_sharded_strategy else ()
        local = getattr(flat, "_local_shard", flat.data).detach()
        prefix = f"{unit}." if unit else ""
        names = [inner_name(model, f"{prefix}{name}") for name in flat._fqns]
        for name, shape, info in zip(names, flat._shapes, flat._shard_param_infos, strict=True):
            sums, count = _sums(local, info, dtype)
            yield FlatPiece(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                fingerprint=fingerprint_text(dtype, count, sums),
                parts=parts if handle.world_size > 1 else (),
                requires_grad=flat.requires_grad,
                tied_to=None,
            )
        yield from _tied(model, prefix, flat, dtype)


def _tied(model: nn.Module, prefix: str, flat: Any, dtype: torch.dtype) -> Iterator[FlatPiece]:
    for info in flat._shared_param_infos:
        own = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        first = (
            f"{info.prim_module_name}.{info.prim_param_name}"
            if info.prim_module_name
            else info.prim_param_name
        )
        shape = dict(zip(flat._fqns, flat._shapes, strict=True)).get(first, ())
        yield FlatPiece(
            name=inner_name(model, f"{prefix}{own}"),
            dtype=dtype,
            shape=tuple(shape),
            fingerprint="",
            parts=(),
            requires_grad=flat.requires_grad,
            tied_to=inner_name(model, f"{prefix}{first}"),
        )


def _sums(local: Tensor, info: Any, dtype: torch.dtype) -> tuple[Tensor, int]:
    if not info.in_shard:
        return torch.zeros(2, dtype=torch.int64), 0
    mine = local.narrow(0, info.offset_in_shard, info.numel_in_shard).to(dtype)
    return partial_fingerprint(mine, info.intra_param_start_idx), int(info.numel_in_shard)


def _handles(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name of the unit, its handle) of every FSDP1 unit that holds parameters."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield name, module._handle
