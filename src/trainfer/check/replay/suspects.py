"""Where a search for causes looks: modules that introduce more than rounding, and what no replay reached.

Takes a replay, and for what it did not reach the bench; gives suspects in the order of execution.
"""
# pyright: standard
# (the bench holds modules, which torch does not type)

from dataclasses import dataclass

import numpy as np

from trainfer.check.replay.records import ModuleReplay, Replay
from trainfer.check.replay.trials_bench import Bench
from trainfer.check.replay.trials_cores import leading
from trainfer.check.replay.trials_layers import attention_facts
from trainfer.check.replay.trials_sites import LOW_DTYPES, errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A module that introduces more than its floor on one side."""

    module: str
    side: int
    floor: float
    factor: float


def suspects_of(replay: Replay) -> list[Suspect]:
    """Modules above their floor, in the order of execution; the side that is further above it."""
    found: list[Suspect] = []
    for item in sorted(replay.modules, key=lambda module: module.order):
        factors = item.factors
        found += [
            Suspect(module=item.module, side=side, floor=item.floors[side].value, factor=factors[side])
            for side in sorted((0, 1), key=lambda number: -factors[number])
            if not factors[side] <= 1
        ]
    return found


def behind_caches(replay: Replay, bench: Bench) -> list[Suspect]:
    """Attention that no replay reached because a cache supplied keys, and that is off where those are computed anew."""
    floors = {
        floor.dtype: max(other.value for item in replay.modules for other in item.floors if other.dtype == floor.dtype)
        for module in replay.modules
        for floor in module.floors
    }  # fmt: skip
    found: list[Suspect] = []
    for name in replay.not_replayed:
        if name not in bench.modules or bench.kind(name) != "attention":
            continue
        for side in (0, 1):
            site = bench.site(name, side, 0.0)
            if site is None or not site.usable() or site.dtype not in floors:
                continue
            facts = attention_facts(bench, site)
            if facts is None or not any(leading(missing) for missing in facts.missing):
                continue
            floor = _COMPUTED_ANEW * floors[site.dtype]
            factor = float(errors(site).max(initial=0.0)) / floor
            if factor > 1:
                found.append(Suspect(module=name, side=side, floor=floor, factor=factor))
    return found


_COMPUTED_ANEW = 4.0
"""Times the largest floor: keys that the side computed in its own dtype, layer upon layer, are computed in float64 here."""


def low_norms(replay: Replay) -> list[ModuleReplay]:
    """Normalisations in a low precision on both sides that differ by themselves, none of them by more than its floor."""
    return [
        item
        for item in sorted(replay.modules, key=lambda module: module.order)
        if item.operator == "norm"
        and all(floor.dtype in LOW_DTYPES for floor in item.floors)
        and max(item.factors) <= 1
        and bool(np.any(item.difference > item.inherited))
    ]
