"""No rounding in between: every lower float dtype that a module asks for becomes float64.

A torch-function mode. Models cast on their way (``x.to(torch.float32)`` in a norm, ``softmax(dtype=torch.float32)``,
``cos.to(x.dtype)``); under this mode each such cast keeps, or gives, float64.
"""
# pyright: standard
# (a mode receives whatever torch is called with)

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = {Tensor.float: torch.float64, Tensor.half: torch.float64, Tensor.bfloat16: torch.float64}


class Wide(TorchFunctionMode):
    """Inside it nothing is computed below float64."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` with every low float dtype replaced."""
        if func in _CASTS:
            return args[0].double()  # type: ignore[attr-defined]
        args = tuple(_widened(value) for value in args)
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **named)


def _widened(value: object) -> object:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value
