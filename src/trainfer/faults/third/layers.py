"""Faults inside the layers: rotary embedding, attention, norms, experts, dropout, and a module that computes something else.

Takes a pair; replaces a forward on one side. Parameters and tokens stay equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainfer.faults.models import attention_name, layer_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second.patch import (
    Attend,
    Forward,
    masked,
    repeated,
    replace_forward,
    scores_of,
    use_attention,
    weighted,
)
from trainfer.faults.third.describe import described

# --- rotary embedding ------------------------------------------------------------------------------------------------


def _rotary(pair: Pair, angles: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compute cos and sin from other angles; ``angles`` takes (frequencies, positions ``[B, T]``)."""
    rotary = pair.find("model.rotary_emb")

    def forward(_: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = angles(rotary.inv_freq, position_ids).float()
        both = torch.cat([half, half], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    replace_forward(rotary, forward)


def _slow_low(pair: Pair) -> Sequence[Expected]:
    """All frequencies but the highest are divided by a factor, as in llama3-style scaling."""

    def angles(frequencies: Tensor, positions: Tensor) -> Tensor:
        low = torch.arange(len(frequencies)) > 0
        return positions[..., None].float() * torch.where(low, frequencies / pair.size, frequencies)

    _rotary(pair, angles)
    return [Expected(cause="rope.scaling", modules=("model.rotary_emb",))]


def _angles_bf16(pair: Pair) -> Sequence[Expected]:
    """Position times frequency is taken in bfloat16."""
    _rotary(pair, lambda frequencies, positions: positions[..., None].bfloat16() * frequencies.bfloat16())
    return [Expected(cause="rope.dtype", modules=("model.rotary_emb",))]


def _table_end(pair: Pair) -> Sequence[Expected]:
    """The table of positions is too short: all further tokens share its last row."""
    last = int(pair.size)
    _rotary(pair, lambda frequencies, positions: positions.clamp(max=last)[..., None].float() * frequencies)
    return [
        Expected(
            cause="rope.positions", modules=("model.rotary_emb",), tokens=lambda b: b.rows(start=last + 1)
        )
    ]


# --- attention -------------------------------------------------------------------------------------------------------


def _attend(pair: Pair, name: str, attend: Attend) -> str:
    """Put a backend into the case's layer; gives the module's name."""
    where = attention_name(pair.faulty, pair.case.layer)
    use_attention(pair.find(where), f"third_{name}", attend)
    return where


def _lag(scores: Tensor) -> Tensor:
    """How many slots a key lies before its query, ``[queries, keys]``."""
    queries, keys = scores.shape[-2:]
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def _blind_to_self(pair: Pair) -> Sequence[Expected]:
    """A strict triangle: no token sees itself, but where it sees no other."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        scores = masked(scores_of(module, q, k, more.get("scaling")), mask)
        others = (scores > -1e9).sum(-1, keepdim=True) > 1
        return weighted(module, torch.where((_lag(scores) == 0) & others, -1e30, scores), v)

    where = _attend(pair, "blind_to_self", attend)
    return [Expected(cause="attention.mask", modules=(where,), tokens=lambda b: b.rows(start=1))]


def _short_sight(pair: Pair) -> Sequence[Expected]:
    """A sliding window in a layer that has none on the other side."""
    reach = int(pair.size)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        scores = masked(scores_of(module, q, k, more.get("scaling")), mask)
        return weighted(module, torch.where(_lag(scores) >= reach, -1e30, scores), v)

    where = _attend(pair, f"short_sight_{reach}", attend)
    return [Expected(cause="attention.window", modules=(where,), tokens=lambda b: b.rows(start=reach))]


def _early_boundary(pair: Pair) -> Sequence[Expected]:
    """Sequence boundaries lie one slot early: the last token of the one before is seen by the next."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        scores = scores_of(module, q, k, more.get("scaling"))
        seen = masked(scores, mask) > -1e9
        first = seen.int().argmax(-1, keepdim=True)
        seen |= torch.arange(scores.shape[-1]) == first - 1
        return weighted(module, torch.where(seen, scores, -1e30), v)

    for number in range(pair.train_model.config.num_hidden_layers):
        attention = pair.train_model.get_submodule(attention_name(pair.train_model, number))
        use_attention(attention, "third_early_boundary", attend)
    where, later = ("model.layers.0.self_attn",), lambda b: b.rows_of(range(1, len(b.tokens)))
    return [Expected(cause="attention.cross_sequence", modules=where, tokens=later)]


def _cap_before_scale(pair: Pair) -> Sequence[Expected]:
    """Products of queries and keys are capped before they are scaled, not after."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        capped = scores_of(module, q, k, 1.0, float(more["softcap"]))
        return weighted(module, masked(capped * more["scaling"], mask), v)

    return [Expected(cause="attention.softcap", modules=(_attend(pair, "cap_before_scale", attend),))]


def _base_two(pair: Pair) -> Sequence[Expected]:
    """Two parts of the keys are merged by sums of exponentials in base 2 that are read as base e."""
    split = 5

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        scores = masked(scores_of(module, q, k, more.get("scaling")), mask).float()
        sizes: list[Tensor] = []
        outs: list[Tensor] = []
        for part in (slice(0, split), slice(split, None)):
            if scores[..., part].shape[-1]:
                sizes.append(scores[..., part].logsumexp(-1).clamp(min=-1e4) / math.log(2))
                outs.append(scores[..., part].softmax(-1) @ repeated(module, v)[..., part, :].float())
        share = torch.stack(sizes).softmax(0)
        out = (share[..., None] * torch.stack(outs)).sum(0)
        return out.to(v.dtype).transpose(1, 2).contiguous(), None

    return [Expected(cause="attention.merge", modules=(_attend(pair, "base_two", attend),))]


def _half_weights(pair: Pair) -> Sequence[Expected]:
    """A kernel that rounds attention weights and values to bfloat16 before it sums."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        weights = masked(scores_of(module, q, k, more.get("scaling")), mask).softmax(-1)
        out = weights.bfloat16().float() @ repeated(module, v).bfloat16().float()
        return out.to(v.dtype).transpose(1, 2).contiguous(), None

    return [Expected(cause="attention.backend", modules=(_attend(pair, "half_weights", attend),))]


# --- norms -----------------------------------------------------------------------------------------------------------


def _norm(pair: Pair, kind: str, compute: Callable[[Any, Tensor], Tensor]) -> str:
    """Put another forward into one norm of the case's layer; gives its name."""
    name = f"{layer_name(pair.faulty, pair.case.layer)}.{kind}"
    norm = pair.find(name)
    replace_forward(norm, lambda _, x: compute(norm, x))
    return name


def _eps_outside(pair: Pair) -> Sequence[Expected]:
    """The small number is added to the root, not under it."""

    def compute(norm: Any, x: Tensor) -> Tensor:
        root = x.float().square().mean(-1, keepdim=True).sqrt()
        return norm.weight * (x.float() / (root + pair.size)).to(x.dtype)

    return [Expected(cause="norm.eps", modules=(_norm(pair, "post_attention_layernorm", compute),))]


def _weight_first(pair: Pair) -> Sequence[Expected]:
    """The weight is multiplied in float32 and the product is rounded once."""

    def compute(norm: Any, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return (norm.weight.float() * wide).to(x.dtype)

    return [Expected(cause="norm.cast_order", modules=(_norm(pair, "input_layernorm", compute),))]


def _variance_bf16(pair: Pair) -> Sequence[Expected]:
    """Squares and their mean are taken in bfloat16."""

    def compute(norm: Any, x: Tensor) -> Tensor:
        variance = x.bfloat16().square().mean(-1, keepdim=True).float()
        return norm.weight * (x.float() * torch.rsqrt(variance + norm.variance_epsilon)).to(x.dtype)

    return [Expected(cause="norm.precision", modules=(_norm(pair, "post_attention_layernorm", compute),))]


# --- experts, dropout, other modules ---------------------------------------------------------------------------------


def _gate(pair: Pair, forward: Forward) -> Sequence[Expected]:
    """Put another forward into the gate of the case's layer."""
    mlp = f"model.layers.{pair.case.layer}.mlp"
    replace_forward(pair.find(f"{mlp}.gate"), forward)
    return [Expected(cause="moe.routing", modules=(f"{mlp}.gate", mlp))]


def _not_to_one(pair: Pair) -> Sequence[Expected]:
    """The gate's weights of the chosen experts are not made to sum to one."""

    def forward(old: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, chosen = old(hidden)
        return logits, logits.float().softmax(-1).gather(-1, chosen), chosen

    return _gate(pair, forward)


def _next_expert(pair: Pair) -> Sequence[Expected]:
    """The second expert is the third-ranked one, with the weight of the second."""

    def forward(old: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = old(hidden)
        return logits, weights, logits.topk(3, dim=-1).indices[..., [0, 2]]

    return _gate(pair, forward)


def _attention_dropout(pair: Pair) -> Sequence[Expected]:
    """Attention weights are dropped in one layer, left in training mode."""
    where = attention_name(pair.faulty, pair.case.layer)
    pair.find(where).attention_dropout = 0.2
    pair.find(where).training = True
    return [Expected(cause="mode.dropout", modules=(where,))]


def _mlp_dropout(pair: Pair) -> Sequence[Expected]:
    """The dropout module behind an MLP is left in training mode."""
    where = f"{layer_name(pair.faulty, pair.case.layer)}.mlp.dropout"
    pair.find(where).train().p = 0.1
    return [Expected(cause="mode.dropout", modules=(where,))]


def _other_activation(pair: Pair) -> Sequence[Expected]:
    """A port computes GELU where the model has SiLU."""
    where = f"model.layers.{pair.case.layer}.mlp.act_fn"
    replace_forward(pair.find(where), lambda _, x: functional.gelu(x, approximate="tanh"))
    return [Expected(cause="module.unknown", modules=(where,))]


def _saturated(pair: Pair) -> Sequence[Expected]:
    """An eight-bit matrix product saturates its output."""
    where = f"model.layers.{pair.case.layer}.self_attn.o_proj"

    def forward(old: Any, x: Tensor) -> Tensor:
        out = old(x)
        bound = out.std(-1, keepdim=True)
        return out.clamp(-bound, bound)

    replace_forward(pair.find(where), forward)
    return [Expected(cause="module.unknown", modules=(where,))]


_FP32 = ("float32",)
FAULTS = (
    described("rope.scaling/slow_low", _slow_low, dtypes=_FP32, magnitudes=(8.0, 2.0)),
    described("rope.dtype/angles_bf16", _angles_bf16, dtypes=_FP32),
    described("rope.positions/table_end", _table_end, magnitudes=(4.0, 7.0)),
    described("attention.mask/blind_to_self", _blind_to_self),
    described("attention.window/short_sight", _short_sight, magnitudes=(3.0, 5.0)),
    described(
        "attention.cross_sequence/early_boundary", _early_boundary, sides=("train",), layouts=("packed",)
    ),
    described(
        "attention.softcap/cap_before_scale", _cap_before_scale, architectures=("gemma2",), dtypes=_FP32
    ),
    described("attention.merge/base_two", _base_two, sides=("rollout",)),
    described("attention.backend/half_weights", _half_weights, dtypes=_FP32),
    described("norm.eps/outside_root", _eps_outside, magnitudes=(1e-2, 1e-3)),
    described("norm.cast_order/weight_first", _weight_first, dtypes=("bfloat16",)),
    described("norm.precision/variance_bf16", _variance_bf16, dtypes=_FP32),
    described("moe.routing/weights_not_one", _not_to_one, architectures=("mixtral",)),
    described("moe.routing/third_for_second", _next_expert, architectures=("mixtral",)),
    described("mode.dropout/attention_weights", _attention_dropout, sides=("train",)),
    described("mode.dropout/behind_mlp", _mlp_dropout, sides=("train",), architectures=("gpt2",)),
    described("module.unknown/other_activation", _other_activation),
    described("module.unknown/saturated_o_proj", _saturated),
)
