"""``result.json``: the machine's view of a comparison, schema ``trainfer.compare/1``.

Takes an explanation; gives records and strict JSON (a number that JSON cannot write is null). Names and rules
are those of the design; tests hold the shape.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainfer.check.compare.records import LogprobResult, ModuleResult
from trainfer.check.explain.records import Cause, Explanation, FirstDivergence

SCHEMA = "trainfer.compare/1"


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the document's parts."""


class StagePart(_Part, frozen=True, kw_only=True):
    """One stage."""

    name: str
    status: str
    summary: str


class FirstDivergencePart(_Part, frozen=True, kw_only=True):
    """Where it begins."""

    stage: str
    module: str | None
    tokens: tuple[tuple[int, int], ...]
    pass_: str | None = msgspec.field(name="pass")


class CausePart(_Part, frozen=True, kw_only=True):
    """One cause."""

    cause: str
    stage: str
    module: str | None
    share_explained: float | None
    confirmed: bool
    evidence: tuple[str, ...]
    fix: str
    repair: str
    """``configuration``, ``execution`` or ``objective``."""
    modules: tuple[str, ...]
    excluded: tuple[str, ...]
    places: dict[str, str]


class RepairPart(_Part, frozen=True, kw_only=True):
    """One thing that can be done."""

    kind: str
    cause: str
    what: str
    places: dict[str, str]


class CoveragePart(_Part, frozen=True, kw_only=True):
    """What took part."""

    rows_rollout: int
    rows_train: int
    rows_matched: int
    modules_matched: int
    modules_unmatched: tuple[str, ...]
    how_matched: dict[str, int]
    not_rows: dict[str, int]
    incomplete: tuple[str, ...]
    notes: tuple[str, ...]


class ModulePart(_Part, frozen=True, kw_only=True):
    """One module, in the order of execution."""

    module: str
    rows: int
    max_abs: float | None
    mean_abs: float | None
    cosine: float | None
    ulp_max: int
    bitwise_equal_fraction: float | None
    introduced: float | None
    inherited: float | None
    noise_floor: float | None
    status: str
    how: str
    notes: tuple[str, ...]


class LogprobPart(_Part, frozen=True, kw_only=True):
    """Differences d = train − rollout of log-probs, in nats."""

    count: int
    abs_diff_mean: float | None
    abs_diff_max: float | None
    k1: float | None
    k2: float | None
    k3: float | None
    pearson: float | None
    bitwise_equal_fraction: float | None


class Document(_Part, frozen=True, kw_only=True):
    """The whole file."""

    schema: str
    verdict: str
    why: str
    stages: tuple[StagePart, ...]
    first_divergence: FirstDivergencePart | None
    causes: tuple[CausePart, ...]
    repairs: tuple[RepairPart, ...]
    next_steps: tuple[str, ...]
    remaining: float | None
    """Mean |Δ log p| that no confirmed cause explains, in nats; null without a replay."""
    coverage: CoveragePart
    modules: tuple[ModulePart, ...]
    logprobs: LogprobPart


def document(explanation: Explanation) -> Document:
    """The document of one comparison."""
    comparison = explanation.comparison
    coverage = comparison.coverage
    return Document(
        schema=SCHEMA,
        verdict=explanation.verdict.value,
        why=explanation.why,
        stages=tuple(
            StagePart(name=stage.name, status=stage.status.value, summary=stage.summary)
            for stage in comparison.stages
        ),
        first_divergence=_first(explanation.first_divergence),
        causes=tuple(_cause(cause) for cause in explanation.causes),
        repairs=tuple(
            RepairPart(kind=item.kind, cause=item.cause, what=item.what, places=dict(item.places))
            for item in explanation.repairs
        ),
        next_steps=explanation.next_steps,
        remaining=None if explanation.remaining is None else finite(explanation.remaining),
        coverage=CoveragePart(
            rows_rollout=coverage.rows_rollout,
            rows_train=coverage.rows_train,
            rows_matched=coverage.rows_matched,
            modules_matched=coverage.modules_matched,
            modules_unmatched=coverage.modules_unmatched,
            how_matched=dict(coverage.how_matched),
            not_rows=dict(coverage.not_rows),
            incomplete=coverage.incomplete,
            notes=coverage.notes,
        ),
        modules=tuple(module_part(module) for module in comparison.modules),
        logprobs=logprob_part(comparison.logprobs),
    )


def encode(found: Document) -> bytes:
    """Strict JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def _first(first: FirstDivergence | None) -> FirstDivergencePart | None:
    if first is None:
        return None
    return FirstDivergencePart(
        stage=first.stage, module=first.module, tokens=first.tokens, pass_=first.pass_name
    )


def _cause(cause: Cause) -> CausePart:
    return CausePart(
        cause=cause.cause,
        stage=cause.stage,
        module=cause.module,
        share_explained=cause.share_explained,
        confirmed=cause.confirmed,
        evidence=cause.evidence,
        fix=cause.fix,
        repair=cause.repair,
        modules=cause.modules,
        excluded=cause.excluded,
        places=dict(cause.places),
    )


def finite(value: float) -> float | None:
    """The number, or None where JSON has none."""
    return float(value) if math.isfinite(value) else None


def module_part(module: ModuleResult) -> ModulePart:
    """One module's line."""
    metrics = module.metrics
    share = metrics.equal / metrics.elements if metrics.elements else None
    return ModulePart(
        module=module.module,
        rows=module.rows,
        max_abs=finite(metrics.max_abs),
        mean_abs=finite(metrics.mean_abs),
        cosine=finite(metrics.cosine),
        ulp_max=metrics.ulp_max,
        bitwise_equal_fraction=share,
        introduced=finite(module.introduced),
        inherited=finite(module.inherited),
        noise_floor=finite(module.tolerance),
        status=module.status.value,
        how=module.how,
        notes=module.notes,
    )


def logprob_part(result: LogprobResult | None) -> LogprobPart:
    """The numbers of ``train.agreement``: k1 = mean(−d), k2 = mean(d²/2), k3 = mean(exp(d) − d − 1)."""
    if result is None or not len(result.rollout):
        return LogprobPart(
            count=0,
            abs_diff_mean=None,
            abs_diff_max=None,
            k1=None,
            k2=None,
            k3=None,
            pearson=None,
            bitwise_equal_fraction=None,
        )
    d = result.difference
    usable = np.isfinite(d)
    equal = (result.rollout == result.train).mean()
    if not usable.any():
        d = np.zeros(0)
    d = d[usable] if len(d) else d
    return LogprobPart(
        count=len(result.rollout),
        abs_diff_mean=_mean(np.abs(d)),
        abs_diff_max=finite(float(np.abs(d).max())) if len(d) else None,
        k1=_mean(-d),
        k2=_mean(d**2 / 2),
        k3=_mean(np.expm1(np.minimum(d, 700.0)) - d),
        pearson=_pearson(result.rollout[usable], result.train[usable]),
        bitwise_equal_fraction=float(equal),
    )


def _mean(values: NDArray[np.float64]) -> float | None:
    return finite(float(values.mean())) if len(values) else None


def _pearson(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    if len(first) < 2 or first.std() == 0 or second.std() == 0:
        return None
    return finite(float(np.corrcoef(first, second)[0, 1]))
