"""Faults of attention, planted as another backend of one layer, or as another config.

Takes a pair; gives one side an attention function that masks, caps, merges or rounds otherwise.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS, WINDOW, attention_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected
from trainfer.faults.second.patch import Attend, masked, repeated, scores_of, use_attention, weighted

SPLIT = 6
BLOCK = 4
MASKED = -1e4
"""Less than this in an additive mask: not visible."""


def _layer(pair: Pair, name: str, attend: Attend) -> str:
    module = attention_name(pair.clean, pair.case.layer)
    use_attention(pair.find(module), name, attend)
    return module


def with_mask(change: Any) -> Attend:
    """Eager attention with a changed mask ``[B, 1, queries, keys]``."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, softcap: float | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        seen = None if mask is None else change(mask)
        return weighted(module, masked(scores_of(module, query, key, scaling, softcap), seen), value)

    return attend


def one_ahead(mask: Tensor) -> Tensor:
    """Each row sees the next token too, where there is one."""
    mask = mask.clone()
    rows = torch.arange(min(mask.shape[-2:]) - 1)
    mask[..., rows, rows + 1] = mask[..., rows + 1, rows + 1]
    return mask


def plant_one_ahead(pair: Pair) -> list[Expected]:
    """The causal triangle is one too wide."""
    module = _layer(pair, "second_one_ahead", with_mask(one_ahead))
    return [Expected(cause="attention.mask", modules=(module,), tokens=Batch.rows)]


def plant_weak(pair: Pair) -> list[Expected]:
    """Masked scores are lowered by a few units in place of minus infinity."""
    fill = -pair.size

    def weak(mask: Tensor) -> Tensor:
        return torch.where(mask < MASKED, torch.full_like(mask, fill), mask)

    return [
        Expected(
            cause="attention.mask", modules=(_layer(pair, f"second_weak_{pair.size:g}", with_mask(weak)),)
        )
    ]


def neighbour(mask: Tensor) -> Tensor:
    """Each packed sequence sees the last token of the one before it."""
    mask = mask.clone()
    visible = mask > MASKED
    first = visible.int().argmax(-1)
    for batch, _, row in (first > 0).nonzero().tolist():
        mask[batch, :, row, first[batch, 0, row] - 1] = 0.0
    return mask


def plant_neighbour(pair: Pair) -> list[Expected]:
    """Sequence ends are off by one."""
    module = _layer(pair, "second_neighbour", with_mask(neighbour))
    return [
        Expected(
            cause="attention.cross_sequence", modules=(module,),
            tokens=lambda batch: batch.rows_of(range(1, len(batch.tokens))),
        )
    ]  # fmt: skip


def plant_window(pair: Pair) -> list[Expected]:
    """One side counts the window without the token itself."""
    config = pair.faulty.config
    config.sliding_window = WINDOW + 1
    module = "model.layers.0.self_attn"
    attention: Any = pair.find(module)
    attention.sliding_window = WINDOW + 1
    tokens = lambda batch: batch.rows(start=WINDOW)  # noqa: E731
    return [Expected(cause="attention.window", modules=(module,), tokens=tokens)]


def plant_every_layer(pair: Pair) -> list[Expected]:
    """One side's config gives every layer the window."""
    config = pair.faulty.config
    config.layer_types = ["sliding_attention"] * LAYERS
    module = "model.layers.1.self_attn"
    attention: Any = pair.find(module)
    attention.layer_type, attention.sliding_window = "sliding_attention", WINDOW
    tokens = lambda batch: batch.rows(start=WINDOW)  # noqa: E731
    return [Expected(cause="attention.window", modules=(module,), tokens=tokens)]


def clamped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores cut at the cap, not bent."""
    assert softcap is not None, "planted in a model with a cap"
    scores = scores_of(module, query, key, scaling).clamp(-softcap, softcap)
    return weighted(module, masked(scores, mask), value)


def plant_clamped(pair: Pair) -> list[Expected]:
    """A kernel that clamps."""
    return [Expected(cause="attention.softcap", modules=(_layer(pair, "second_clamped", clamped),))]


def plant_no_cap(pair: Pair) -> list[Expected]:
    """A kernel without caps serves every layer."""
    for layer in range(LAYERS):
        attention: Any = pair.find(attention_name(pair.clean, layer))
        attention.config = copy.deepcopy(attention.config)
        attention.attn_logit_softcapping = attention.config.attn_logit_softcapping = None
    return [Expected(cause="attention.softcap", modules=("model.layers.0.self_attn",))]


def merged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Two parts of the context, added up by their own sums as if their maxima were one."""
    scores = masked(scores_of(module, query, key, scaling, softcap), mask).float()
    values = repeated(module, value).float()
    total, weight = torch.zeros(()), torch.zeros(())
    for part in (slice(0, SPLIT), slice(SPLIT, None)):
        here = scores[..., part]
        if here.shape[-1]:
            top = here.max(-1, keepdim=True).values
            raised = torch.where(here > MASKED, (here - top).exp(), torch.zeros(()))
            total = total + raised @ values[:, :, part]
            weight = weight + raised.sum(-1, keepdim=True)
    return (total / weight).to(query.dtype).transpose(1, 2).contiguous(), None


def plant_merged(pair: Pair) -> list[Expected]:
    """A split kernel forgets to rescale."""
    tokens = lambda batch: batch.rows(start=SPLIT)  # noqa: E731
    module = _layer(pair, "second_merged", merged)
    return [Expected(cause="attention.merge", modules=(module,), tokens=tokens)]


def coarse_weights(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights in float8 before they meet the values."""
    scores = masked(scores_of(module, query, key, scaling, softcap), mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(torch.float8_e4m3fn).to(value.dtype)
    return (weights @ repeated(module, value)).transpose(1, 2).contiguous(), weights


def rounded_sums(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weighted sum goes block by block and is kept in bfloat16 between blocks."""
    scores = masked(scores_of(module, query, key, scaling, softcap), mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    values = repeated(module, value)
    total = torch.zeros_like(query)
    for start in range(0, values.shape[2], BLOCK):
        part = slice(start, start + BLOCK)
        total = (total + weights[..., part] @ values[:, :, part]).bfloat16().to(query.dtype)
    return total.transpose(1, 2).contiguous(), weights


def _backend(name: str, attend: Attend, pair: Pair) -> list[Expected]:
    return [Expected(cause="attention.backend", modules=(_layer(pair, name, attend),))]


FAULTS = (
    Fault(
        name="attention.mask/one_ahead", plant=plant_one_ahead, sides=("train",), layouts=("right", "left"),
        summary="one layer sees one token ahead",
    ),
    Fault(
        name="attention.mask/weak", plant=plant_weak, magnitudes=(3.0, 6.0, 9.0, 12.0),
        summary="one layer's masked scores are lowered by the size in place of minus infinity",
    ),
    Fault(
        name="attention.cross_sequence/neighbour", plant=plant_neighbour, sides=("train",), layouts=("packed",),
        summary="packed sequences see the last token of the one before, in one layer",
    ),
    Fault(
        name="attention.window/wider", plant=plant_window, architectures=("gemma2",),
        summary="one side's window is one token wider",
    ),
    Fault(
        name="attention.window/every_layer", plant=plant_every_layer, architectures=("gemma2",),
        summary="one side's config gives the window to the layer that has none",
    ),
    Fault(
        name="attention.softcap/clamped", plant=plant_clamped, architectures=("gemma2",), dtypes=("float32",),
        summary="one layer's scores are cut at the cap in place of bent by tanh",
    ),
    Fault(
        name="attention.softcap/no_layer", plant=plant_no_cap, architectures=("gemma2",), dtypes=("float32",),
        summary="no layer caps its scores",
    ),
    Fault(
        name="attention.merge/no_rescale", plant=plant_merged, sides=("train",), layouts=("right",),
        dtypes=("float32",), summary="two parts of the context are added up without regard to their maxima",
    ),
    Fault(
        name="attention.backend/weights_fp8", plant=lambda pair: _backend("second_fp8", coarse_weights, pair),
        summary="one layer's attention weights in float8",
    ),
    Fault(
        name="attention.backend/blocks", plant=lambda pair: _backend("second_blocks", rounded_sums, pair),
        dtypes=("float32",), summary="one layer's weighted sum is kept in bfloat16 between blocks of keys",
    ),
)  # fmt: skip
