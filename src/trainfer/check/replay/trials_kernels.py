"""Assumptions about an attention kernel's precision: where on its way it rounds.

Takes the cores of one layer; gives attempts. A kernel in a low precision takes rounded queries, keys and values, may round
scores, and rounds weights before they meet the values: after they were normalised, or before (fused kernels, which
divide by the sum of what was not rounded at the end).

Axes: H heads, T tokens, S keys.
"""
# pyright: standard

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainfer.check.replay.trials_attention import Change
from trainfer.check.replay.trials_cores import AttentionFacts, attempt
from trainfer.check.replay.trials_sites import Attempt, rounded

Softmax = Callable[[Tensor], Tensor]


def precision_attempts(facts: AttentionFacts) -> Iterator[Attempt]:
    """What is rounded to which dtype; the least first."""
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        for what, change in _changes(dtype).items():
            text = f"{what} rounded to {name} inside the kernel"
            yield attempt(facts, "attention.backend", change, text, grid=True, rounded=what, dtype=name)


def _changes(dtype: torch.dtype) -> dict[str, Change]:
    def low(values: Tensor) -> Tensor:
        return rounded(values, dtype)

    softmaxes: dict[str, Softmax | None] = {
        "": None,
        "scores": lambda scores: low(scores).softmax(-1),
        "weights": lambda scores: low(scores.softmax(-1)),
        "scores and weights": lambda scores: low(low(scores).softmax(-1)),
        "weights before the division": lambda scores: _unnormalised(scores, low),
    }
    inputs = "queries, keys and values"
    return {
        **{f"{what} are": Change(softmax=soft) for what, soft in softmaxes.items() if what},
        **{
            f"{inputs}{', ' + what if what else ''} are": Change(
                queries=low, keys=low, values=low, softmax=soft
            )
            for what, soft in softmaxes.items()
        },
        "queries and keys are": Change(queries=low, keys=low),
    }


def _unnormalised(scores: Tensor, low: Callable[[Tensor], Tensor]) -> Tensor:
    """``[H, T, S]``: exponentials are rounded, their sum is not."""
    top = scores.amax(-1, keepdim=True)
    parts = (scores - top).exp()
    return low(parts) / parts.sum(-1, keepdim=True)
