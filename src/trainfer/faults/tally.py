"""Adds scores up: per cause, per size of the fault, in all; and holds them against the targets.

Takes scores; gives plain records. Only *counted* cases enter shares: a fault with a size that moves log-probs by less than
three times the noise is reported apart.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainfer.faults.records import Outcome, Scores

TARGET_TOP1 = 0.95
TARGET_FAMILY = 0.90
TARGET_ALARMS = 0
BANDS = ((0.0, 1.0), (1.0, 3.0), (3.0, 10.0), (10.0, 100.0), (100.0, 1e4), (1e4, float("inf")))
"""Of |Δ log p| over the clean pair's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Right ones among those for which the score is defined."""

    right: int
    of: int

    @property
    def value(self) -> float | None:
        """Between 0 and 1; None where it is defined for none."""
        return self.right / self.of if self.of else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Scores of some cases."""

    name: str
    cases: int
    top1: Share
    top3: Share
    family: Share
    exact: Share
    tokens: float | None
    """Mean intersection over union."""
    first_step: Share
    explained: float | None
    """Mean share of |Δ log p| that the causes explain, where they say."""
    seconds: float
    """Mean per case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Below:
    """Cases whose fault is smaller than three times the noise."""

    cases: int
    found: int
    """With the right family."""
    quiet: int
    """Equal or rounding, and no cause named."""
    wrong: int
    """A cause of another family, or another module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """All of it."""

    total: Line
    causes: tuple[Line, ...]
    bands: tuple[Line, ...]
    """Faults with a size, by the size of their effect; all cases, also those that do not count."""
    below: Below
    alarms: int
    controls: int

    @property
    def missed(self) -> tuple[str, ...]:
        """Targets that are not reached, in words."""
        missed: list[str] = []
        for name, share, target in (
            ("module top-1", self.total.top1, TARGET_TOP1),
            ("cause family", self.total.family, TARGET_FAMILY),
        ):
            if share.value is not None and share.value < target:
                missed.append(f"{name} {share.value:.1%} of {share.of} (target {target:.0%})")
        if self.alarms > TARGET_ALARMS:
            missed.append(f"{self.alarms} false alarms in {self.controls} controls (target {TARGET_ALARMS})")
        return tuple(missed)


def tally(scores: Scores) -> Tally:
    """Add up."""
    counted = [outcome for outcome in scores.outcomes if outcome.counted]
    causes = dict.fromkeys(outcome.case.cause for outcome in scores.outcomes)
    sized = [outcome for outcome in scores.outcomes if outcome.case.has_size and outcome.ratio is not None]
    bands = [
        _line(_band_name(low, high), [o for o in sized if o.ratio is not None and low <= o.ratio < high])
        for low, high in BANDS
    ]
    return Tally(
        total=_line("all", counted),
        causes=tuple(_line(cause, [o for o in counted if o.case.cause == cause]) for cause in causes),
        bands=tuple(band for band in bands if band.cases),
        below=_below([outcome for outcome in scores.outcomes if not outcome.counted]),
        alarms=sum(bool(control.alarm) for control in scores.controls),
        controls=len(scores.controls),
    )


def _band_name(low: float, high: float) -> str:
    if low == 0:
        return f"under {high:g}×"
    return f"over {low:g}×" if high == float("inf") else f"{low:g}× to {high:g}×"


def _line(name: str, outcomes: Sequence[Outcome]) -> Line:
    return Line(
        name=name,
        cases=len(outcomes),
        top1=_share(outcomes, lambda outcome: outcome.top1),
        top3=_share(outcomes, lambda outcome: outcome.top3),
        family=_share(outcomes, lambda outcome: outcome.family),
        exact=_share(outcomes, lambda outcome: outcome.exact),
        tokens=_mean(outcome.tokens for outcome in outcomes),
        first_step=_share(outcomes, lambda outcome: outcome.first_step),
        explained=_mean(outcome.share for outcome in outcomes),
        seconds=_mean(outcome.seconds for outcome in outcomes) or 0.0,
    )


def _share(outcomes: Sequence[Outcome], of: Callable[[Outcome], bool | None]) -> Share:
    known = [value for value in map(of, outcomes) if value is not None]
    return Share(right=sum(known), of=len(known))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _below(outcomes: Sequence[Outcome]) -> Below:
    found = [outcome for outcome in outcomes if outcome.family]
    quiet = [outcome for outcome in outcomes if not outcome.family and is_quiet(outcome)]
    return Below(
        cases=len(outcomes), found=len(found), quiet=len(quiet), wrong=len(outcomes) - len(found) - len(quiet)
    )


def is_quiet(outcome: Outcome) -> bool:
    """The comparison called the pair equal or rounding and named no cause but its shape."""
    answer = outcome.answer
    return (
        answer is not None
        and answer.verdict in ("equal", "rounding")
        and all(cause.startswith("shape.") for cause in answer.causes)
    )
