"""``trainfer.seed_all``: msProbe's arguments, made plain.

Seeds Python, NumPy and torch on every device; on request asks torch for deterministic algorithms, sets every dropout
to 0, or makes every random function start from the same state.
"""
# pyright: standard
# (torch.backends has partial types)

import functools
import os
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from trainfer.errors import CaptureError

_MAX_SEED = 2**32 - 1
_RANDOM_FUNCTIONS = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "rand_like",
    "randn_like",
)


def seed_all(
    seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False  # noqa: FBT001, FBT002
) -> None:  # fmt: skip
    """Make a run repeatable.

    Args:
        seed: From 0 to 2**32 - 1; for Python, NumPy and torch. Hash seeds of new processes too.
        mode: Deterministic algorithms: an operator that has none raises, with its name.
        rm_dropout: Dropout layers and functions drop nothing from now on.
        is_enhanced: Every call of a random function of torch gives what it gave the first time: a program that
            draws more numbers on one side is then still comparable.

    Raises:
        CaptureError: the seed is no such number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise CaptureError(f"seed_all: seed={seed!r}; give a whole number from 0 to {_MAX_SEED}")
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if rm_dropout:
        _remove_dropout()
    if is_enhanced:
        for name in _RANDOM_FUNCTIONS:
            _freeze(name, seed)


def _remove_dropout() -> None:
    functional = nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        original = getattr(functional, name)
        if not hasattr(original, "__wrapped__"):
            setattr(functional, name, _without_dropout(original))


def _without_dropout(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def dropout(input: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        return original(input, p=0.0, training=True)

    return dropout


def _freeze(name: str, seed: int) -> None:
    original = getattr(torch, name)
    if hasattr(original, "__wrapped__"):
        original = original.__wrapped__

    @functools.wraps(original)
    def frozen(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("generator") is None:
            torch.manual_seed(seed)
        return original(*args, **kwargs)

    setattr(torch, name, frozen)
