"""Differences of rounding size that have a cause: the order of casts in a normalisation.

Takes one normalisation on both sides, in a low precision; says which order of casts gives each side's bits. Both are
right; where the two sides have different ones, every norm adds an error of one unit in the last place.
"""
# pyright: standard

from dataclasses import dataclass

import torch
from torch import Tensor

from trainfer.check.replay.trials_forced import Trace
from trainfer.check.replay.trials_norm import cast_variants, norm_facts
from trainfer.check.replay.trials_sites import TORCH_DTYPES, Site

_SAME = 0.97
"""Of a side's elements: so many must have the bits of one order."""
_APART = 0.01
"""By so much of the elements the other order must be behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CastOrder:
    """Two sides with different orders of casts."""

    names: tuple[str, str]
    """Rollout's and training's."""
    evidence: tuple[str, ...]
    other: tuple[Tensor, ...]
    """What the rollout would have computed in training's order, one tensor per usable trace."""


def cast_order(rollout: Site, train: Site) -> CastOrder | None:
    """The orders, where both are certain and differ."""
    found = [_shares(site) for site in (rollout, train)]
    if found[0] is None or found[1] is None:
        return None
    best = [max(shares, key=lambda name: shares[name]) for shares in found]  # type: ignore[union-attr]
    for shares, name in zip(found, best, strict=True):
        assert shares is not None
        if shares[name] < _SAME or any(
            shares[name] - value < _APART for key, value in shares.items() if key != name
        ):
            return None
    if best[0] == best[1]:
        return None
    lines = [
        f"{side}: {name} gives {shares[name]:.2%} of the bits, the other order {min(shares.values()):.2%}"
        for side, name, shares in zip(("rollout", "train"), best, found, strict=True)
        if shares is not None
    ]
    return CastOrder(names=(best[0], best[1]), evidence=tuple(lines), other=_predicted(rollout, best[1]))


def _shares(site: Site) -> dict[str, float] | None:
    """Order -> share of the known elements that have its bits."""
    equal: dict[str, int] = {}
    count = 0
    for trace in site.usable():
        rows = site.rows(trace)
        variants = _variants(site, trace)
        if rows is None or variants is None:
            return None
        for name, values in variants.items():
            equal[name] = equal.get(name, 0) + int((values == rows[1])[rows[2]].sum())
        count += int(rows[2].sum()) * rows[1].shape[1]
    return {name: value / count for name, value in equal.items()} if count else None


def _variants(site: Site, trace: Trace) -> dict[str, Tensor] | None:
    facts = norm_facts(site)
    dtype = TORCH_DTYPES.get(site.dtype)
    x = site.given(trace)
    if facts is None or dtype is None or x is None or facts.centred:
        return None
    made = cast_variants(x, facts.weight_W, facts.eps, dtype)
    return {name: values.double() for name, values in made.items()}


def _predicted(site: Site, name: str) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for trace in site.usable():
        variants = _variants(site, trace)
        assert variants is not None
        found.append(variants[name].to(torch.float64))
    return tuple(found)
