"""Eval mode for a while; whether somebody watches a module."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and all its submodules into eval mode, and each back as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def is_watched(module: nn.Module) -> bool:
    """Whether a hook wants to see the module or a part of it at work."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
