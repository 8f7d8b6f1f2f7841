"""What trials of attention share: the cores of all sequences, and one change done to them.

Takes nothing; records and two functions. ``trials_scores`` and ``trials_cache`` say what is changed.

Axes: T tokens, S slots, G key heads, K head size.
"""
# pyright: standard

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainfer.check.replay.hypotheses import Hypothesis
from trainfer.check.replay.trials_attention import Change, Core, run_core
from trainfer.check.replay.trials_sites import Attempt, Site, relative


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """What else lay in the same batch entry as one sequence.

    Axes: S slots before the sequence's own, G key heads, K head size.
    """

    keys_SGK: Tensor
    """After rotation, as the side computed them."""
    values_SGK: Tensor
    padding: int
    """How many of the slots are padding; the others belong to other sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """Cores of all usable traces, with what the trials need beside them."""

    cores: tuple[Core, ...]
    neighbours: tuple[Neighbours | None, ...]
    missing: tuple[Tensor, ...]
    """Per trace ``[T]``: True where the side computed no key of its own under these weights: a cache supplied it."""
    old: tuple[tuple[Tensor, Tensor, int] | None, ...]
    """Keys (before rotation) and values ``[T, G, K]`` that the side computed under an earlier version, and up to where."""
    decode: tuple[Tensor, ...]
    """Per trace ``[T]``: True for rows of decode passes."""


def slots_in_front(facts: AttentionFacts) -> list[int]:
    """Of each trace: slots of its batch entry before its own first one."""
    return [0 if near is None else len(near.keys_SGK) for near in facts.neighbours]


def leading(mask_T: Tensor) -> int:
    """How many of the first rows are True without a gap."""
    return int(mask_T.int().cumprod(0).sum())


def errors_of(site: Site, number: int) -> np.ndarray:
    """Row errors of one trace, 0 where not known."""
    rows = site.rows(site.usable()[number])
    assert rows is not None
    error = relative(rows[1], rows[0])
    return np.where(rows[2].numpy(), error, 0.0)


def attempt(
    facts: AttentionFacts,
    cause: str,
    change: Change | Sequence[Change],
    evidence: str,
    *,
    grid: bool = False,
    **parameters: float | str,
) -> Attempt:
    """One change, or one for each trace, done."""
    changes = [change] * len(facts.cores) if isinstance(change, Change) else change
    return Attempt(
        hypothesis=Hypothesis(cause=cause, parameters=parameters, evidence=(evidence,), grid=grid),
        predicted=tuple(run_core(core, one) for core, one in zip(facts.cores, changes, strict=True)),
    )
