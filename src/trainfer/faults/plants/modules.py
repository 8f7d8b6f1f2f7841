"""Small changes that several plants share: another forward for one module, a hook on its outputs.

Takes a module; changes it in place. Nothing here knows a cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that replaces a module's own; an object, so that a copied model keeps it."""

    module: nn.Module
    compute: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it with the module in front."""
        return self.compute(self.module, *args, **kwargs)


def replace_forward(module: nn.Module, compute: Callable[..., Any]) -> None:
    """Let ``compute(module, ...)`` stand for the module's forward; hooks see it as the module's own."""
    module.__dict__["forward"] = Forward(module, compute)


def norms_of(model: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """RMS norms in the order of definition."""
    return [(name, module) for name, module in model.named_modules() if "RMSNorm" in type(module).__name__]


def rms_eps(module: nn.Module) -> str:
    """The name of a norm's eps attribute."""
    return "variance_epsilon" if "variance_epsilon" in vars(module) else "eps"


def in_bf16(x: Tensor) -> Tensor:
    """Round to bfloat16 and come back."""
    return x.to(torch.bfloat16).to(x.dtype)
