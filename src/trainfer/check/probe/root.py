"""Reads what the root module was called with.

Takes arguments of a forward; gives ``CallInputs`` (integers only) and what else decides the rows: the cache object
and which logits were asked for. Knows the argument names of Transformers' causal models, by name, not by import.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trainfer.check.probe.leaves import KeyValueCache, argument_leaves
from trainfer.check.probe.rows import CallInputs, NamedPrefix
from trainfer.exact.layout import RowLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCall:
    """A call of the root, as read before it runs."""

    inputs: CallInputs
    cache: KeyValueCache | None
    kept_columns: np.ndarray | None
    """Columns whose logits were asked for (``logits_to_keep``); None for all."""


def read_root_call(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> RootCall:
    """Read a call; what is not there is None in the answer."""
    named = {**_positional_names(module, args), **kwargs}
    ids = named.get("input_ids")
    cache = _cache_in(named)
    length_before = _cached_length(cache)
    if isinstance(ids, Tensor) and ids.dim() in (1, 2) and not ids.is_floating_point():
        tokens_BT = _integers(ids if ids.dim() == 2 else ids[None])
        batch, length = tokens_BT.shape
    else:
        tokens_BT = None
        batch, length = _leading_dims(args, kwargs)
    mask = named.get("attention_mask")
    mask_BL = _integers(mask) if isinstance(mask, Tensor) and mask.dim() == 2 else None
    positions = named.get("position_ids")
    starts = named.get("cu_seq_lens_q")
    inputs = CallInputs(
        tokens_BT=tokens_BT,
        batch=batch,
        length=length,
        mask_B=mask_BL,
        unreadable=_why_unreadable(mask, mask_BL, named.get("attention_plan")),
        positions_BT=_positions(positions, batch, length),
        segment_starts=_integers(starts) if isinstance(starts, Tensor) else None,
        cached=length_before,
    )
    return RootCall(
        inputs=inputs,
        cache=cache if isinstance(cache, KeyValueCache) else None,
        kept_columns=_kept_columns(named.get("logits_to_keep"), length),
    )


@runtime_checkable
class NamesItsRows(Protocol):
    """An attention plan that can tell whose row is whose; only a probe asks."""

    def row_prefixes(self) -> Sequence[NamedPrefix | None]:
        """For each row its sequence's name and tokens from 0 up to and with the row; None for a dummy row."""
        ...


@runtime_checkable
class HasLayout(Protocol):
    """An attention plan of sequences packed on one row axis."""

    @property
    def layout(self) -> RowLayout:
        """Which rows each sequence consists of; what follows its rows is dummies."""
        ...


def packed_layout(kwargs: Mapping[str, object]) -> RowLayout | None:
    """The layout behind the call's attention plan, where it has one."""
    plan = kwargs.get("attention_plan")
    layout = plan.layout if isinstance(plan, HasLayout) else None
    return layout if isinstance(layout, RowLayout) else None


def named_prefixes(kwargs: Mapping[str, object]) -> Sequence[NamedPrefix | None] | None:
    """What the attention plan says of its rows, where it says something."""
    plan = kwargs.get("attention_plan")
    return plan.row_prefixes() if isinstance(plan, NamesItsRows) else None


def cache_of_output(output: object) -> KeyValueCache | None:
    """The cache that a forward returned."""
    cache = _cache_in(cast("Mapping[str, object]", output)) if isinstance(output, Mapping) else None
    return cache if isinstance(cache, KeyValueCache) else None


def _cache_in(named: Mapping[str, object]) -> object:
    """The key-value cache among arguments or outputs; Transformers calls it ``cache`` from 5.24 on."""
    return named.get("past_key_values", named.get("cache"))


def _positional_names(module: nn.Module, args: Sequence[object]) -> dict[str, object]:
    if not args:
        return {}
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names, args, strict=False))


def _integers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(device="cpu", dtype=torch.int64).numpy()


def _leading_dims(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[int, int]:
    """Batch and token dimension of the first tensor: [B, T, ...], or [T] as one entry."""
    for _, tensor in argument_leaves(args, kwargs, []):
        if tensor.dim() == 0:
            continue
        return (tensor.shape[0], tensor.shape[1]) if tensor.dim() > 1 else (1, tensor.shape[0])
    return (1, 0)


def _cached_length(cache: object) -> int:
    if isinstance(cache, KeyValueCache):
        return int(cache.get_seq_length())
    if isinstance(cache, tuple) and cache and isinstance(cache[0], tuple) and isinstance(cache[0][0], Tensor):
        return int(cache[0][0].shape[-2])
    return 0


def _positions(positions: object, batch: int, length: int) -> np.ndarray | None:
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    fits = positions.shape[0] in (1, batch) and positions.shape[1] == length
    return _integers(positions) if fits else None


def _why_unreadable(mask: object, mask_BL: np.ndarray | None, plan: object) -> str:
    if plan is not None:
        return f"the attention plan ({type(plan).__name__}) does not tell whose rows it serves"
    return "" if mask is None or mask_BL is not None else "the attention mask is not [batch, tokens]"


def _kept_columns(kept: object, length: int) -> np.ndarray | None:
    if isinstance(kept, Tensor) and kept.dim() == 1:
        return _integers(kept) % max(length, 1)
    if isinstance(kept, int) and 0 < kept < length:
        return np.arange(length - kept, length)
    return None
