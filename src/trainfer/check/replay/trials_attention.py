"""Attention's core, from captured queries, keys and values, with one thing done otherwise.

Takes what one layer's core was given on one sequence (float64); gives its rows under an assumption: which keys a row sees,
what is done to scores, to keys and values, to the sum. The core without any assumption is held against the model's own
first: attention that is more than this (sinks, biases) gets no trial.

Axes: T tokens, H query heads, G key heads, K head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """What one layer's core is given."""

    q_THK: Tensor
    """Before rotation."""
    k_TGK: Tensor
    v_TGK: Tensor
    cos_TR: Tensor | None
    """None without a rotary embedding; R may be less than K."""
    sin_TR: Tensor | None
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What is done otherwise; everything at its default is the core as it is."""

    visible: Callable[[Tensor, Tensor], Tensor] | None = None
    """(rows ``[T, 1]``, keys ``[1, S]``) -> True where a row sees a key; None: the causal mask with the core's window."""
    window: int | None = -1
    """−1: the core's own."""
    softcap: float | None = -1.0
    scale: float | None = None
    queries: Callable[[Tensor], Tensor] | None = None
    """On queries after rotation."""
    softmax: Callable[[Tensor], Tensor] | None = None
    """Masked scores ``[H, T, S]`` -> weights; None: the softmax."""
    total: Callable[[Tensor, Tensor], Tensor] | None = None
    """(weights ``[H, T, S]``, values ``[S, H, K]``) -> rows ``[T, H, K]``; None: their product."""
    keys: Callable[[Tensor], Tensor] | None = None
    """On keys after rotation, as a cache stores them."""
    values: Callable[[Tensor], Tensor] | None = None
    rows: Tensor | None = None
    """Rows that ``keys`` and ``values`` hold for; None: all."""
    interleaved: bool = False
    """Pairs of neighbouring features are turned, not halves."""
    extra: tuple[Tensor, Tensor] | None = None
    """More keys (rotated) and values ``[S, G, K]`` that every row sees."""


def rotate(states_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, interleaved: bool = False) -> Tensor:
    """Transformers' half-split rotary embedding, or the interleaved one."""
    width = cos_TR.shape[1]
    turned, rest = states_THK[..., :width], states_THK[..., width:]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    if interleaved:
        half = width // 2
        cos, sin = (table[..., :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
        other = torch.stack([-turned[..., 1::2], turned[..., 0::2]], dim=-1).flatten(-2)
    else:
        half = width // 2
        other = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    return torch.cat([turned * cos + other * sin, rest], dim=-1)


def rotated(core: Core, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Queries and keys as they meet."""
    if core.cos_TR is None or core.sin_TR is None:
        return core.q_THK, core.k_TGK
    turn = core.cos_TR, core.sin_TR
    return (
        rotate(core.q_THK, *turn, interleaved=interleaved),
        rotate(core.k_TGK, *turn, interleaved=interleaved),
    )


def run_core(core: Core, change: Change | None = None) -> Tensor:
    """Rows ``[T, H·K]`` of the core, before the output projection."""
    change = change or Change()
    q, k = rotated(core, interleaved=change.interleaved)
    q = change.queries(q) if change.queries else q
    plain = _attend(core, change, q, k, core.v_TGK)
    if change.keys is None and change.values is None:
        return plain
    stored = change.keys(k) if change.keys else k
    values = change.values(core.v_TGK) if change.values else core.v_TGK
    changed = _attend(core, change, q, stored, values)
    return changed if change.rows is None else torch.where(change.rows[:, None], changed, plain)


def weights_of(core: Core, change: Change | None = None) -> Tensor:
    """Softmax weights ``[H, T, S]``."""
    q, k = rotated(core)
    return _weights(core, change or Change(), q, k)


def _attend(core: Core, change: Change, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if change.extra is not None:
        v = torch.cat([v, change.extra[1]])
        k = torch.cat([k, change.extra[0]])
    weights = _weights(core, change, q, k)
    groups = q.shape[1] // v.shape[1]
    values = v.repeat_interleave(groups, dim=1)
    out = change.total(weights, values) if change.total else torch.einsum("hts,shk->thk", weights, values)
    return out.reshape(len(q), -1)


def _weights(core: Core, change: Change, q: Tensor, k: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scale = core.scale if change.scale is None else change.scale
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(groups, dim=1)) * scale
    softcap = core.softcap if change.softcap == -1.0 else change.softcap
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    length, count = len(core.q_THK), len(core.k_TGK)
    rows, keys = torch.arange(length)[:, None], torch.arange(count)[None]
    window = core.window if change.window == -1 else change.window
    seen = causal(rows, keys, window) if change.visible is None else change.visible(rows, keys)
    if len(k) > count:
        seen = torch.cat([seen, torch.ones(length, len(k) - count, dtype=torch.bool)], dim=1)
    masked = scores.masked_fill(~seen, -torch.inf)
    return torch.nan_to_num(change.softmax(masked) if change.softmax else masked.softmax(dim=-1))


def causal(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """A row sees itself and what came before, the last ``window`` of them."""
    seen = keys <= rows
    return seen if window is None else seen & (rows - keys < window)


def parts_at(core: Core, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over the keys before ``split`` and from it on, each by itself, ``[T, H, K]``, and the log of their sums ``[T, H]``."""
    q, k = rotated(core)
    groups = q.shape[1] // k.shape[1]
    values = core.v_TGK.repeat_interleave(groups, dim=1)
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(groups, dim=1)) * core.scale
    rows, keys = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = causal(rows, keys, core.window)
    found: list[Tensor] = []
    for part in (seen & (keys < split), seen & (keys >= split)):
        masked = scores.masked_fill(~part, -torch.inf)
        weights = torch.nan_to_num(masked.softmax(dim=-1))
        found += [torch.einsum("hts,shk->thk", weights, values), torch.logsumexp(masked, dim=-1).T]
    return found[0], found[2], found[1], found[3]


def with_tables(core: Core, cos_TR: Tensor, sin_TR: Tensor) -> Core:
    """The same with other rotary tables."""
    return replace(core, cos_TR=cos_TR, sin_TR=sin_TR)
