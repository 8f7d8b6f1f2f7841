"""GRPO post-training in which the policy that samples is the policy that trains.

Reading order for a newcomer:
``config -> plan -> train.data -> train.rollout -> train.reward -> train.advantage -> train.update``
strung together by ``run``; and ``check.probe -> dump -> align -> compare -> explain -> report``.

This file imports nothing but what it takes to find a public name when it is asked for, so that
``trainfer --help`` and ``trainfer plan`` never load torch.
"""

import importlib

_PUBLIC = {
    "PrecisionDebugger": "trainfer.integrations.msprobe.debugger",
    "Rows": "trainfer.check.probe.given",
    "capture": "trainfer.integrations.capture",
    "compare": "trainfer.integrations.dumps",
    "module_dump": "trainfer.integrations.msprobe.debugger",
    "module_dump_end": "trainfer.integrations.msprobe.debugger",
    "seed_all": "trainfer.integrations.msprobe.seeds",
}
"""Public name and the module that defines it; loaded at first use."""

__all__ = ["PrecisionDebugger", "Rows", "capture", "compare", "module_dump", "module_dump_end", "seed_all"]  # fmt: skip  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Load a public name.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trainfer' has no attribute {name!r}; public names: {sorted(_PUBLIC)}")
    return vars(importlib.import_module(_PUBLIC[name]))[name]


def __dir__() -> list[str]:
    """Public names."""
    return sorted([*globals(), *_PUBLIC])
