"""Attention whose inputs or maths a fault may change, one module at a time.

Takes modules of Transformers and a change; modules without one compute exactly what the model's own eager attention
computes. Registered in Transformers' tables under ``NAME``, as an engine registers its kernels.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "trainfer_faults"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Arguments of one attention. Axes: B entries, H heads, Q query rows, S key rows, K head size."""

    module: nn.Module
    query: Tensor
    """[B, H, Q, K]"""
    key: Tensor
    """[B, key/value heads, S, K]"""
    value: Tensor
    mask: Tensor | None
    """Added to the scores, [B, 1, Q, S]; None for no mask."""
    scaling: float
    softcap: float | None

    @property
    def allowed(self) -> Tensor:
        """[B, 1, Q, S], True where a query sees a key."""
        if self.mask is None:
            shape = (self.query.shape[0], 1, self.query.shape[2], self.key.shape[2])
            return torch.ones(shape, dtype=torch.bool)
        return self.mask == 0

    def mask_of(self, allowed: Tensor) -> Tensor:
        """The additive mask of a boolean one."""
        low = torch.finfo(self.query.dtype).min
        return torch.zeros(allowed.shape, dtype=self.query.dtype).masked_fill(~allowed, low)

    def scores(self) -> Tensor:
        """[B, H, Q, S], masked, in the model's dtype."""
        groups = self.query.shape[1] // self.key.shape[1]
        scores = self.query @ self.key.repeat_interleave(groups, 1).transpose(2, 3) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores if self.mask is None else scores + self.mask

    def values(self) -> Tensor:
        """[B, H, S, K]."""
        return self.value.repeat_interleave(self.query.shape[1] // self.value.shape[1], 1)


Change = Callable[[Call], "Call | Tensor"]
"""Another call, which the model's own attention computes, or the result [B, H, Q, K]."""

_changes: "WeakKeyDictionary[nn.Module, Change]" = WeakKeyDictionary()


def change_attention(model: PreTrainedModel, module: nn.Module, change: Change) -> None:
    """Let ``change`` decide what one attention module of a model computes."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.config._attn_implementation = NAME
    before = _changes.get(module)
    _changes[module] = change if before is None else _after(before, change)


def _after(first: Change, second: Change) -> Change:
    def both(call: Call) -> Call | Tensor:
        changed = first(call)
        assert isinstance(changed, Call), "a change that computes the result comes last"
        return second(changed)

    return both


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    call = Call(
        module=module, query=query, key=key, value=value, mask=attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=softcap,
    )  # fmt: skip
    change = _changes.get(module)
    changed = call if change is None else change(call)
    if isinstance(changed, Tensor):
        return changed.transpose(1, 2).contiguous(), None
    more = {} if changed.softcap is None else {"softcap": changed.softcap}
    return eager(
        module,
        changed.query,
        changed.key,
        changed.value,
        changed.mask,
        scaling=changed.scaling,
        dropout=dropout,
        **more,
    )
