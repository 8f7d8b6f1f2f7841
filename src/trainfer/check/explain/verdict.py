"""From findings to an answer: verdict, first divergence, causes.

Takes a comparison; gives an ``Explanation``. Causes that follow from the stages themselves are found here
(``tokens``, ``weights``, ``logprobs``). A module that differs by itself is named with the cause ``module.unknown``:
the replay that says more puts its causes in the place of ``_module_causes``.
"""

from collections.abc import Mapping

from trainfer.check.compare.judge import module_label
from trainfer.check.compare.records import Comparison, PointResult, Status, Verdict
from trainfer.check.explain.first import first_divergence, first_point
from trainfer.check.explain.fixes import fix_for
from trainfer.check.explain.logprobs import logprob_causes
from trainfer.check.explain.records import Cause, Explanation, FirstDivergence
from trainfer.check.explain.tokens import Decode, token_causes
from trainfer.check.explain.weights import weight_causes


def explain(
    comparison: Comparison, *, decode: Decode | None = None, texts: Mapping[int, str] | None = None
) -> Explanation:
    """Say what a comparison means.

    Args:
        comparison: What the stages found.
        decode: Token ids -> text, where a tokenizer is at hand.
        texts: Text of each token id, for reports.
    """
    first = first_divergence(comparison)
    causes = [
        *token_causes(comparison.tokens, decode),
        *weight_causes(comparison),
        *_module_causes(comparison),
        *logprob_causes(comparison),
        *_batch_causes(comparison),
    ]
    verdict, why = _verdict(comparison, first)
    return Explanation(
        verdict=verdict,
        why=why,
        first_divergence=first,
        causes=tuple(causes),
        comparison=comparison,
        texts=texts or {},
    )


def _verdict(comparison: Comparison, first: FirstDivergence | None) -> tuple[Verdict, str]:
    statuses = {stage.name: stage.status for stage in comparison.stages}
    if first is not None:
        where = f" in {first.module}" if first.module is not None else ""
        count = f", {len(first.tokens)} tokens" if first.tokens else ""
        return Verdict.DIVERGED, f"the two sides diverge at stage {first.stage}{where}{count}"
    incomplete = comparison.coverage.incomplete
    if incomplete:
        return (
            Verdict.INCOMPARABLE,
            f"what could be read agrees, but the dumps are not whole: {incomplete[0]}",
        )
    coverage = comparison.coverage
    if coverage.modules_unmatched and not coverage.modules_matched:
        return (
            Verdict.INCOMPARABLE,
            f"both sides captured modules and none was matched: {_why_nothing(comparison)}",
        )
    compared = {statuses["modules"], statuses["logprobs"]} - {Status.NOT_CHECKED}
    if not compared:
        if comparison.stale_versions is not None:
            return Verdict.INCOMPARABLE, comparison.stage("weights").summary
        return Verdict.INCOMPARABLE, f"nothing could be compared: {_why_nothing(comparison)}"
    if Status.ROUNDING in statuses.values():
        return Verdict.ROUNDING, "the two sides agree within rounding"
    return Verdict.EQUAL, "the two sides are equal bit for bit in everything that was compared"


def _why_nothing(comparison: Comparison) -> str:
    coverage = comparison.coverage
    if coverage.rows_rollout and coverage.rows_train and not coverage.rows_matched:
        return "no row has the same weights version and token prefix on both sides"
    if coverage.modules_unmatched:
        return f"no module was matched, e.g. {coverage.modules_unmatched[0]}"
    return f"{coverage.rows_rollout} rows in the rollout, {coverage.rows_train} in training"


def _module_causes(comparison: Comparison) -> list[Cause]:
    """The first module that is off by itself, its cause unknown without a replay."""
    if comparison.stage("modules").status is not Status.DIVERGED:
        return []
    found = first_point(comparison)
    if found is None:
        return []
    result, rows = found
    if result.point.part == "index":
        return [_routing(result, int(rows.sum()))]
    metrics = result.metrics
    evidence = [
        f"{int(rows.sum())} of {len(rows)} rows are off by themselves; worst relative error {result.worst:.3g}, "
        f"rounding allows {result.tolerance:.3g}",
        f"max |d| {metrics.max_abs:.4g}, cosine {metrics.cosine:.6f}, {result.dtypes[0]} against {result.dtypes[1]}",
        *result.notes,
    ]
    return [
        Cause(
            cause="module.unknown",
            stage="modules",
            module=result.point.module,
            share_explained=None,
            confirmed=False,
            evidence=tuple(evidence),
            fix=fix_for("module.unknown"),
        )
    ]


def _routing(result: PointResult, flipped: int) -> Cause:
    """Whole numbers that a module gives are choices: other experts."""
    text = f"{flipped} of {len(result.errors)} rows choose other experts; what follows in these rows is a consequence"
    return Cause(
        cause="moe.routing",
        stage="modules",
        module=result.point.module,
        share_explained=None,
        confirmed=False,
        evidence=(text,),
        fix=fix_for("moe.routing"),
    )


def _batch_causes(comparison: Comparison) -> list[Cause]:
    """Rows that one side computed twice with other bits. Behind a module that is wrong this proves nothing."""
    off = [result for result in comparison.repeated if result.status is not Status.EQUAL]
    if not off or comparison.stage("modules").status is Status.DIVERGED:
        return []
    first = off[0]
    text = f"{module_label(first)}: {int((first.errors > 0).sum())} of {len(first.errors)} repeated rows changed, "
    text += f"max |d| {first.metrics.max_abs:.3g}"
    return [
        Cause(
            cause="shape.batch",
            stage="batch_shape",
            module=first.point.module,
            share_explained=None,
            confirmed=True,
            evidence=(text,),
            fix=fix_for("shape.batch"),
        )
    ]
