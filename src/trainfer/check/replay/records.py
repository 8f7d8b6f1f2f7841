"""What a replay found, as records; no torch, so that ``explain`` and ``report`` can use it.

For one module f with inputs x and outputs y on either side, and f̂ the same module in high precision::

    introduced(side) = y(side) − f̂(x(side))
    inherited        = f̂(x(train)) − f̂(x(rollout))
    y(train) − y(rollout) = introduced(train) − introduced(rollout) + inherited

Arrays hold one float64 per joined row: the L2 norm of the term over the row's L2 norm of f̂(x(rollout)).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainfer.check.compare.records import JoinedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """How far apart variants of one computation are that have the same maths: measured, not chosen."""

    operator: str
    """``linear``, ``norm``, ``rope``, ``attention``, ``activation``, ``embedding``, ``head`` ..."""
    dtype: str
    width: int
    """Of an output row."""
    contraction: int
    """Length of the sums behind one output element; 1 where there are none."""
    sequence: int
    """Rows that one output row depends on; 1 but for attention."""
    value: float
    """Largest relative L2 error of a row against high precision, over all variants and over all modules with these
    operator, dtype and sizes, times ``floors.SAFETY``; never below half a unit in the last place of the dtype."""
    variants: tuple[str, ...]
    """What was varied: batch shapes, splits, orders, backends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleReplay:
    """One module, replayed on both sides' inputs."""

    module: str
    operator: str
    order: int
    """Place in execution order."""
    rows: JoinedRows | None
    introduced_rollout: NDArray[np.float64]
    introduced_train: NDArray[np.float64]
    inherited: NDArray[np.float64]
    difference: NDArray[np.float64]
    floors: tuple[NoiseFloor, NoiseFloor]
    """Of the rollout's and the train side's dtype."""
    leaf: bool
    """No replayed module lies inside it."""
    place: str = "output"
    """What the arrays are about: ``output``, or ``input of PART`` where a module with parts differs most in what it
    hands to one of them (the sum of a residual, attention between the projections). Of such a module only what it does
    itself is replayed: the results of its captured parts are taken as they were captured."""

    @property
    def factors(self) -> tuple[float, float]:
        """Worst introduced error over the noise floor, per side; above 1 is more than rounding."""
        pairs = zip((self.introduced_rollout, self.introduced_train), self.floors, strict=True)
        first, second = (float(rows.max(initial=0.0)) / max(floor.value, 1e-30) for rows, floor in pairs)
        return first, second


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One cause, undone: what became of the difference."""

    cause: str
    module: str | None
    side: str
    """``rollout`` or ``train``: the one that the cause was undone on."""
    parameters: Mapping[str, float | str]
    """What was assumed: ``{"eps": 1e-5}``."""
    reproduced: bool
    """The module's captured output comes out within its noise floor under the assumption, and does not without."""
    error_before: float
    """Worst introduced error of the rows concerned, relative."""
    error_after: float
    share_explained: float | None
    """Of the mean |Δ log p| over response tokens; None where no log-probs were recorded."""
    modules: tuple[str, ...] = ()
    """All modules of the side in which the same assumption reproduces, in the order of execution."""
    evidence: tuple[str, ...] = ()
    """What in the numbers spoke for it."""
    rejected: tuple[tuple[str, float], ...] = ()
    """Causes that were tried here and did not reproduce, with the share of the error that each left, best first."""
    tokens: tuple[tuple[int, int], ...] = ()
    """(rollout sequence, position) of the rows that are off."""
    floor: float = 0.0
    """What rounding may introduce in ``module``, relative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """All that was replayed."""

    modules: tuple[ModuleReplay, ...]
    not_replayed: Mapping[str, str]
    """Module -> why not."""
    trials: tuple[Trial, ...] = field(default=())
    """In the order in which they were made; a confirmed one stays undone for those after it."""
    remaining: float | None = None
    """Mean |Δ log p| left when all confirmed causes are undone."""
    order: Mapping[str, int] = field(default_factory=dict[str, int])
    """Every module whose result was captured, also those that were not replayed -> its place in the execution."""
