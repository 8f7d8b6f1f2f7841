"""What a comparison found, as records; no torch, so that ``explain`` and ``report`` can use it.

A *point* is a place in the model (see ``align.points``), a *row* one token position of one sequence. All
differences are train − rollout. Numbers are float64 over elements that are finite on both sides.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainfer.check.align.edits import Edit
from trainfer.check.align.points import Point
from trainfer.check.dump.records import SequenceRecord


class Status(enum.Enum):
    """How two things relate."""

    EQUAL = "equal"
    """Every compared value is the same."""
    ROUNDING = "rounding"
    """Different, but by no more than the tolerance of the dtype and width."""
    DIVERGED = "diverged"
    UNMATCHED = "unmatched"
    """The other side has nothing to compare it with."""
    UNREADABLE = "unreadable"
    """Its bytes are damaged."""
    NOT_CHECKED = "not_checked"


class Verdict(enum.Enum):
    """The answer to the whole comparison."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    DIVERGED = "diverged"
    INCOMPARABLE = "incomparable"
    """Nothing could be established, or something that must be read could not be."""


STAGES = ("tokens", "weights", "modules", "logprobs", "batch_shape")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One of ``STAGES``."""

    name: str
    status: Status
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Sums over elements, so that blocks can be added up.

    Example: x = [1, 2], y = [1, 4] (rollout, train): ``elements=2, equal=1, max_abs=2, sum_abs=2, dot=9``.
    """

    elements: int = 0
    equal: int = 0
    """Same value on both sides."""
    max_abs: float = 0.0
    sum_abs: float = 0.0
    sum_relative: float = 0.0
    """Of |train − rollout| / |rollout| where the rollout is not zero."""
    max_relative: float = 0.0
    within_thousandth: int = 0
    """Elements with a relative difference below 1/1000."""
    within_five_thousandths: int = 0
    dot: float = 0.0
    """Of elements in rows that are not bitwise equal; so are the next three."""
    sum_rollout_squared: float = 0.0
    sum_train_squared: float = 0.0
    sum_difference_squared: float = 0.0
    ulp_max: int = 0
    """Largest distance in representable numbers of the coarser dtype; 0 for dtypes without one."""
    nan_rollout: int = 0
    """Elements that are NaN or infinite there and not equal on the other side."""
    nan_train: int = 0
    nan_both: int = 0
    """NaN at the same place on both sides."""

    @property
    def mean_abs(self) -> float:
        """Over all elements."""
        return self.sum_abs / self.elements if self.elements else 0.0

    @property
    def cosine(self) -> float:
        """Of the rows that differ; 1 where none does or both are zero."""
        norm = math.sqrt(self.sum_rollout_squared) * math.sqrt(self.sum_train_squared)
        if norm == 0:
            return 1.0 if self.sum_difference_squared == 0 else 0.0
        return max(-1.0, min(1.0, self.dot / norm))

    @property
    def relative(self) -> float:
        """1 − 2xy / (xx + yy) of the rows that differ."""
        total = self.sum_rollout_squared + self.sum_train_squared
        return self.sum_difference_squared / total if total else 0.0

    def plus(self, other: "Metrics") -> "Metrics":
        """Both blocks together."""
        return Metrics(
            elements=self.elements + other.elements,
            equal=self.equal + other.equal,
            max_abs=max(self.max_abs, other.max_abs),
            sum_abs=self.sum_abs + other.sum_abs,
            sum_relative=self.sum_relative + other.sum_relative,
            max_relative=max(self.max_relative, other.max_relative),
            within_thousandth=self.within_thousandth + other.within_thousandth,
            within_five_thousandths=self.within_five_thousandths + other.within_five_thousandths,
            dot=self.dot + other.dot,
            sum_rollout_squared=self.sum_rollout_squared + other.sum_rollout_squared,
            sum_train_squared=self.sum_train_squared + other.sum_train_squared,
            sum_difference_squared=self.sum_difference_squared + other.sum_difference_squared,
            ulp_max=max(self.ulp_max, other.ulp_max),
            nan_rollout=self.nan_rollout + other.nan_rollout,
            nan_train=self.nan_train + other.nan_train,
            nan_both=self.nan_both + other.nan_both,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedRows:
    """Which rows an array of row errors is about; shared by all points with the same calls."""

    labels: NDArray[np.int64]
    """Index into the rollout's sequences; −1 where not recorded."""
    positions: NDArray[np.int64]
    passes: NDArray[np.int64]
    """Index into ``pass_names``."""
    pass_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult:
    """One pair of points, compared."""

    point: Point
    how: str
    order: int
    status: Status
    metrics: Metrics
    errors: NDArray[np.float32]
    """Per joined row: the larger of the relative L2 difference and max |d| / max |value|; inf where NaN."""
    rows: JoinedRows | None
    """None where rows are not known and the two were joined by order."""
    tolerance: float
    """What ``errors`` may be in a pair that agrees."""
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of the first record of either side."""
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """Largest row error."""
        return float(self.errors.max()) if len(self.errors) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleResult:
    """All outputs of one module (over its uses within a call) together."""

    module: str
    status: Status
    rows: int
    metrics: Metrics
    introduced: float
    """Largest error of rows whose inputs are within tolerance; 0 where all of it came in (without a replay)."""
    inherited: float
    """Largest error of its inputs."""
    tolerance: float
    how: str
    order: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFinding:
    """Two sequences that should hold the same ids, and do not; or log-probs that stand at other tokens."""

    kind: str
    """``sides`` (rollout against train), ``rollout`` or ``train`` (recorded ids against executed rows),
    ``rollout_logprobs`` or ``train_logprobs`` (recorded log-probs against captured logits)."""
    sequence: int
    """Index into the rollout's sequences (the side's own for self-checks)."""
    edits: tuple[Edit, ...]
    first: SequenceRecord | None
    second: SequenceRecord | None
    lag: int | None = None
    """Shift that explains it."""
    other_sequence: int | None = None
    """The sequence whose tokens these are."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFinding:
    """One parameter or buffer that is not the same on both sides."""

    name: str
    module: str
    kind: str
    """``differs``, ``missing_in_rollout``, ``missing_in_train``, ``tie`` (tied on one side only), ``adapter_missing``,
    ``adapter_scale``, ``padded`` (more rows on one side)."""
    role: str
    rollout_version: int | None
    train_version: int | None
    same_as: str = ""
    """Where it comes from, as far as that is known: ``train version 2``, ``fused in …``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobFit:
    """Which reading of the captured logits gives the log-probs that a side recorded."""

    reading: str
    """``declared``, ``raw``, ``scaled``, ``unfiltered``, ``divided_after``, ``cut``, ``unknown``."""
    temperature: float
    worst: float
    """Largest |recorded − derived| under that reading."""
    declared_worst: float
    """The same under what the side declared."""
    tokens: int
    width: int | None = None
    """Reading ``cut``: columns that took part, of the wider logits; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobResult:
    """Response tokens of joined sequences. a = train, b = rollout, d = a − b."""

    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Of the scored token, in prompt + response."""
    rollout: NDArray[np.float64]
    train: NDArray[np.float64]
    allowed: NDArray[np.float64]
    """What |d| may be: bounded by the logits' difference where they were captured."""
    declared: tuple[Mapping[str, float | int], Mapping[str, float | int]]
    fits: tuple[LogprobFit | None, LogprobFit | None] = (None, None)
    rescored: float | None = None
    """Mean |d| after both sides were derived from their logits under one reading."""
    policy_moved: int = 0
    """Pairs left out because their weights versions differ."""

    @property
    def difference(self) -> NDArray[np.float64]:
        """One d per token."""
        return self.train - self.rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What was compared, and what was not."""

    rows_rollout: int = 0
    rows_train: int = 0
    rows_matched: int = 0
    modules_matched: int = 0
    modules_unmatched: tuple[str, ...] = ()
    how_matched: Mapping[str, int] = field(default_factory=dict[str, int])
    not_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Slots seen and left out: ``rollout padding``, ``train discarded`` ..."""
    incomplete: tuple[str, ...] = ()
    """What is missing from the dumps; with anything here there is no verdict ``equal`` or ``rounding``."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that the stages found; ``explain`` turns it into a verdict."""

    stages: tuple[Stage, ...]
    rollout_sequences: tuple[SequenceRecord, ...]
    train_sequences: tuple[SequenceRecord, ...]
    tokens: tuple[TokenFinding, ...]
    weights: tuple[WeightFinding, ...]
    weights_order: Mapping[str, int]
    """Module -> place in execution order."""
    points: tuple[PointResult, ...]
    modules: tuple[ModuleResult, ...]
    repeated: tuple[PointResult, ...]
    """Rows with equal keys on one side, against each other."""
    logprobs: LogprobResult | None
    coverage: Coverage
    introduced: Mapping[int, NDArray[np.bool_]]
    """Place in ``points`` -> per row: further off than the module and its inputs explain (diverged outputs only)."""
    stale_versions: tuple[int, int] | None = None
    """(rollout, train) weights versions that have no common one."""

    def stage(self, name: str) -> Stage:
        """One stage by name."""
        return next(stage for stage in self.stages if stage.name == name)


def worst_of(statuses: Sequence[Status]) -> Status:
    """The most serious one; ``NOT_CHECKED`` for none."""
    for status in (Status.DIVERGED, Status.UNREADABLE, Status.ROUNDING, Status.EQUAL, Status.UNMATCHED):
        if status in statuses:
            return status
    return Status.NOT_CHECKED
