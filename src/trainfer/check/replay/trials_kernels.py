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
from trainfer.check.replay.trials_cores import AttentionFacts, attempt, slots_in_front
from trainfer.check.replay.trials_sites import LOW_DTYPES, Attempt, rounded

Softmax = Callable[[Tensor], Tensor]


def precision_attempts(facts: AttentionFacts) -> Iterator[Attempt]:
    """What is rounded to which dtype; the least first."""
    for name, dtype in LOW_DTYPES.items():
        for what, change in _changes(dtype).items():
            text = f"{what} rounded to {name} inside the kernel"
            yield attempt(facts, "attention.backend", change, text, grid=True, rounded=what, dtype=name)
        for keys in _BLOCKS:
            what = f"the weighted sum, after every {keys} keys, is"
            sums = [Change(total=_in_blocks(keys, pad, dtype)) for pad in slots_in_front(facts)]
            text = f"{what} rounded to {name} inside the kernel"
            yield attempt(facts, "attention.backend", sums, text, grid=True, rounded=what, dtype=name)
    for name, dtype in (("FP8 E4M3", torch.float8_e4m3fn), ("FP8 E5M2", torch.float8_e5m2)):
        coarse = Change(softmax=lambda scores, dtype=dtype: _to_float8(scores.softmax(-1), dtype))
        text = f"weights are rounded to {name} inside the kernel"
        yield attempt(facts, "attention.backend", coarse, text, grid=True, rounded="weights are", dtype=name)


def _to_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.float().to(dtype).double()


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
        "weights and values are": Change(values=low, softmax=softmaxes["weights"]),
    }


_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


def _in_blocks(keys: int, pad: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Sums over blocks of keys, kept in a low precision between them."""

    def total(weights_HTS: Tensor, values_SHK: Tensor) -> Tensor:
        found = torch.zeros(())
        for start in range(-(pad % keys), len(values_SHK), keys):
            block = slice(max(start, 0), start + keys)
            part = torch.einsum("hts,shk->thk", weights_HTS[..., block], values_SHK[block])
            found = rounded(found + part, dtype)
        return found

    return total


def _unnormalised(scores: Tensor, low: Callable[[Tensor], Tensor]) -> Tensor:
    """``[H, T, S]``: exponentials are rounded, their sum is not."""
    top = scores.amax(-1, keepdim=True)
    parts = (scores - top).exp()
    return low(parts) / parts.sum(-1, keepdim=True)
