"""A module again, elsewhere and in another precision, with some of its parts replaced.

Takes a module; gives one of the same class that shares nothing that it changes: no hooks, eval mode, eager attention,
parameters as the caller converts them. The original is not touched. Only what is not replaced is converted, so the
copy of a layer whose parts are replaced holds no weights.
"""
# pyright: standard
# (torch's own types are partial)

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor, nn

Convert = Callable[[str, Tensor], Tensor]
"""Full canonical parameter (or buffer) name and its tensor -> the tensor to compute with."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OURS = "trainfer.exact."


def clone(
    module: nn.Module,
    name: str,
    parts: Mapping[str, nn.Module],
    convert: Convert,
    *,
    attention: str = "eager",
) -> nn.Module:
    """A copy for calling.

    Args:
        module: The original.
        name: Its canonical name.
        parts: Canonical name of a part -> what stands in its place.
        convert: Applied to each parameter and buffer that is left.
        attention: Transformers' attention implementation in the copy.
    """
    kind = type(module)
    while kind.__module__.startswith(_OURS):
        kind = kind.__mro__[1]
    made: nn.Module = object.__new__(kind)
    state = dict(vars(module))
    state.pop("forward", None)
    state["training"] = False
    state |= {hook: OrderedDict[int, object]() for hook in _HOOKS if hook in state}
    for group in ("_parameters", "_buffers"):
        state[group] = {
            local: None if tensor is None else convert(_join(name, local), tensor.detach())
            for local, tensor in state[group].items()
        }
    children = {}
    for local, child in module._modules.items():
        full = _join(name, local)
        if full in parts:
            children[local] = parts[full]
        else:
            children[local] = (
                None if child is None else clone(child, full, parts, convert, attention=attention)
            )
    state["_modules"] = children
    if "_attn_implementation" in dir(state.get("config")):
        state["config"] = plain_config(state["config"], attention)
    vars(made).update(state)
    return made


def plain_config(config: object, attention: str = "eager") -> object:
    """A copy of a Transformers configuration that asks for plain kernels: grouped expert products know no float64."""
    changed = copy.copy(config)
    vars(changed)["_attn_implementation_internal"] = attention
    vars(changed)["_experts_implementation_internal"] = "eager"
    return changed


def _join(name: str, local: str) -> str:
    return f"{name}.{local}" if name else local
