"""What these plants have in common: a forward replaced in Python, an attention backend of one layer, and weights that move.

Takes modules and models; changes them in place. Which cause that makes is the plants' business.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

Forward = Callable[..., Any]
"""(the forward that was there, its arguments) -> output."""
Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""As a backend of Transformers: (module, query, key, value, mask, **options) -> (output [B, T, H, K], weights)."""


def replace_forward(module: nn.Module, forward: Forward) -> None:
    """Put another forward in place of a module's own, as a script that patches an object does."""
    module.forward = functools.partial(forward, module.forward)


def use_attention(attention: Any, name: str, attend: Attend) -> None:
    """Make one attention module compute with a backend of ours; masks are made as before, by the model's own setting."""
    AttentionInterface.register(name, attend)
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = name


def repeated(attention: Any, states: Tensor) -> Tensor:
    """Keys or values ``[B, H, T, K]``, one for each query head."""
    groups = 1 if not hasattr(attention, "num_key_value_groups") else attention.num_key_value_groups
    return states.repeat_interleave(groups, dim=1)


def scores_of(
    attention: Any, query: Tensor, key: Tensor, scaling: float | None, softcap: float | None = None
) -> Tensor:
    """Scores ``[B, H, queries, keys]`` before the mask, as eager attention makes them."""
    scale = attention.head_dim**-0.5 if scaling is None else scaling
    scores = query @ repeated(attention, key).transpose(2, 3) * scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with the mask added."""
    return scores if mask is None else scores + mask[..., : scores.shape[-1]]


def weighted(attention: Any, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax in float32, then the weighted sum of values, as eager attention does."""
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ repeated(attention, value)).transpose(1, 2).contiguous(), weights


def moved(
    model: PreTrainedModel,
    size: float,
    generator: torch.Generator,
    only: Callable[[str], bool] = lambda _: True,
) -> dict[str, Tensor]:
    """Parameters after an update: each moves by ``size`` times its own root mean square, in a random direction."""
    return {
        name: (
            parameter
            + size
            * parameter.float().square().mean().sqrt()
            * torch.randn(parameter.shape, generator=generator)
        ).to(parameter.dtype)
        for name, parameter in ((name, p.detach()) for name, p in model.named_parameters())
        if only(name)
    }


def write(
    model: nn.Module, weights: Mapping[str, Tensor], only: Callable[[str], bool] = lambda _: True
) -> None:
    """Copy weights into the parameters of that name."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            if only(name):
                own[name].copy_(value)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
