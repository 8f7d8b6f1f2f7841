"""What a site's error is worth to the model: grafts, and the rows that are off.

Takes a site, and an assumption about it; gives errors by sequence that the bench adds where they arose.
"""
# pyright: standard
# (modules are untyped in torch)

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from trainfer.check.replay.trials_bench import Graft
from trainfer.check.replay.trials_cores import AttentionFacts, leading
from trainfer.check.replay.trials_sites import Attempt, Site, relative


def graft_to(site: Site, predicted: Sequence[torch.Tensor]) -> Graft:
    """What the side computed, less what it would have computed otherwise."""
    changed: dict[int, torch.Tensor] = {}
    for trace, other in zip(site.usable(), predicted, strict=True):
        rows = site.rows(trace)
        assert rows is not None
        changed[trace.label] = torch.where(rows[2][:, None], rows[1] - other, torch.zeros_like(other))
    return Graft(places=site.places, errors=changed)


def graft_of(site: Site, attempt: Attempt | None) -> Graft:
    """What an assumption adds to the reference; without one what the side captured."""
    changed: dict[int, torch.Tensor] = {}
    for number, trace in enumerate(site.usable()):
        rows = site.rows(trace)
        assert rows is not None
        computed, captured, known = rows
        other = captured if attempt is None else attempt.predicted[number]
        off = torch.where(known[:, None], other - computed, torch.zeros_like(computed))
        changed[trace.label] = torch.nan_to_num(off, nan=0.0, posinf=0.0, neginf=0.0)
    return Graft(places=site.places, errors=changed)


def tokens_of(site: Site) -> tuple[tuple[int, int], ...]:
    """(sequence, position) of the rows that are off."""
    found: list[tuple[int, int]] = []
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        off = (relative(rows[1], rows[0]) > site.floor) & rows[2].numpy()
        found += [(trace.label, int(position)) for position in np.flatnonzero(off)]
    return tuple(found)


def behind_a_cache(site: Site, facts: AttentionFacts) -> str | None:
    """Evidence that rows are off only behind keys that the side did not compute under these weights; None where not."""
    touched = supplied = 0
    for trace, missing in zip(site.usable(), facts.missing, strict=True):
        rows = site.rows(trace)
        assert rows is not None
        off = (relative(rows[1], rows[0]) > site.floor) & rows[2].numpy()
        prefix = leading(missing)  # the last row often was not computed either
        if off.any() and (prefix == 0 or int(np.flatnonzero(off)[0]) < prefix):
            return None
        touched += int(off.any())
        supplied += prefix if off.any() else 0
    if not touched:
        return None
    text = f"all rows that are off, in {touched} sequences, stand behind {supplied} positions whose keys and values a cache"
    return (
        f"{text} supplied; queries and own keys are right, and sequences computed from their start are exact"
    )


def adapter_of(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """A, B and scaling of a PEFT layer's one active adapter."""
    parts = [getattr(layer, name, None) for name in ("lora_A", "lora_B", "scaling")]
    if not isinstance(parts[0], nn.ModuleDict) or not isinstance(parts[1], nn.ModuleDict):
        return None
    names = list(parts[0])
    scaling = parts[2]
    if len(names) != 1 or not isinstance(scaling, dict):
        return None
    a, b = (_weight(part[names[0]]) for part in parts[:2] if isinstance(part, nn.ModuleDict))
    return a, b, float(scaling[names[0]])


def _weight(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().double()
