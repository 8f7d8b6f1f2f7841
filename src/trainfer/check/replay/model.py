"""The model that both sides are replayed with: its modules by name, and how it calls them."""
# pyright: standard
# (torch's own types are partial)

import torch
from torch import nn

from trainfer.check.align.names import canonical
from trainfer.check.compare.joined import JoinedSides
from trainfer.check.probe.names import named_modules
from trainfer.check.replay.calls import learn_calls
from trainfer.check.replay.execute import Reference
from trainfer.check.replay.modules import operator_of


def read_model(model: nn.Module, joined: JoinedSides) -> Reference:
    """Modules by canonical name, and how the model calls them.

    Raises:
        Exception: whatever the model raises when it runs.
    """
    modules = {canonical(name, joined.names): module for name, module in named_modules(model).items()}
    names_of = {id(module): name for name, module in modules.items()}
    parts = {
        name: tuple(names_of[id(child)] for child in module.children()) for name, module in modules.items()
    }
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return Reference(
        modules=modules,
        calls=learn_calls(model, joined.names),
        operators={name: operator_of(module, name) for name, module in modules.items()},
        parts=parts,
        device=device,
    )


def bare_kind(module: nn.Module) -> str:
    """The class without trainfer's own routing."""
    kind = type(module)
    while kind.__module__.startswith("trainfer.exact."):
        kind = kind.__mro__[1]
    return kind.__name__
