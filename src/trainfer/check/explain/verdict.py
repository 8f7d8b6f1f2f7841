"""From findings to an answer: verdict, first divergence, causes, repairs, the next step.

Takes a comparison, and where a model was at hand a replay with its trials; gives an ``Explanation``. Causes of the
stages tokens, weights and logprobs follow from the stages themselves. A module that differs by itself is explained by
the trials; without a replay by what both sides' manifests and the rows say, unproven; else it is ``module.unknown``.
"""

from collections.abc import Mapping

import numpy as np

from trainfer.check.compare.judge import module_label
from trainfer.check.compare.records import Comparison, PointResult, Status, Verdict
from trainfer.check.explain.attributes import cause_from_facts
from trainfer.check.explain.facts import SideFacts
from trainfer.check.explain.first import first_divergence, first_point
from trainfer.check.explain.fixes import make_cause, repairs_for
from trainfer.check.explain.logprobs import logprob_causes
from trainfer.check.explain.next_steps import next_steps
from trainfer.check.explain.records import Cause, Explanation, FirstDivergence
from trainfer.check.explain.rounding import dtype_causes, rounding_causes
from trainfer.check.explain.tokens import Decode, token_causes
from trainfer.check.explain.trials import causes_of_trials, loudest
from trainfer.check.explain.weights import weight_causes
from trainfer.check.replay.records import Replay


def explain(
    comparison: Comparison,
    *,
    replay: Replay | None = None,
    facts: tuple[SideFacts, SideFacts] | None = None,
    decode: Decode | None = None,
    texts: Mapping[int, str] | None = None,
) -> Explanation:
    """Say what a comparison means.

    Args:
        comparison: What the stages found.
        replay: What either side introduced, and the trials, where a model was at hand.
        facts: What both sides (rollout, train) say of themselves.
        decode: Token ids -> text, where a tokenizer is at hand.
        texts: Text of each token id, for reports.
    """
    first = first_divergence(comparison, replay)
    causes = (
        *token_causes(comparison.tokens, decode),
        *weight_causes(comparison),
        *_module_causes(comparison, replay, facts),
        *logprob_causes(comparison),
        *_batch_causes(comparison),
    )
    if not causes:
        causes = (*dtype_causes(comparison),)
    if replay is not None and not causes:
        causes = (*rounding_causes(comparison),)
    verdict, why = _verdict(comparison, first, replay)
    result = comparison.logprobs
    differs = result is not None and bool(np.any(result.difference != 0))
    return Explanation(
        verdict=verdict,
        why=why,
        first_divergence=first,
        causes=causes,
        comparison=comparison,
        texts=texts or {},
        repairs=repairs_for(causes, differs=differs),
        next_steps=next_steps(verdict, causes, comparison, replayed=replay is not None),
        remaining=None if replay is None else replay.remaining,
    )


def _verdict(
    comparison: Comparison, first: FirstDivergence | None, replay: Replay | None
) -> tuple[Verdict, str]:
    statuses = {stage.name: stage.status for stage in comparison.stages}
    if first is not None:
        where = f" in {first.module or 'the model itself'}" if first.module is not None else ""
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
        return Verdict.ROUNDING, f"the two sides agree within rounding{_factor(replay)}"
    return Verdict.EQUAL, "the two sides are equal bit for bit in everything that was compared"


def _factor(replay: Replay | None) -> str:
    """How close the nearest module comes to its floor."""
    found = None if replay is None else loudest(replay)
    if replay is None or found is None:
        return ""
    module, factor = found
    text = f": each of {len(replay.modules)} replayed modules introduces at most {factor:.2f} times its measured noise floor"
    return f"{text} ({module.module or 'the model itself'})"


def _why_nothing(comparison: Comparison) -> str:
    coverage = comparison.coverage
    if coverage.rows_rollout and coverage.rows_train and not coverage.rows_matched:
        return "no row has the same weights version and token prefix on both sides"
    if coverage.modules_unmatched:
        return f"no module was matched, e.g. {coverage.modules_unmatched[0]}"
    return f"{coverage.rows_rollout} rows in the rollout, {coverage.rows_train} in training"


def _module_causes(
    comparison: Comparison, replay: Replay | None, facts: tuple[SideFacts, SideFacts] | None
) -> list[Cause]:
    """Causes of modules that are off by themselves."""
    found = first_point(comparison)
    if (
        found is not None
        and found[0].point.part == "index"
        and comparison.stage("modules").status is Status.DIVERGED
    ):
        return [
            _routing(found[0], int(found[1].sum())),
            *([] if replay is None else causes_of_trials(replay)),
        ]
    if replay is not None and replay.trials:
        wider = [result for result in comparison.points if _is_wider(result)]
        return [*causes_of_trials(replay), *[_padded(comparison, result) for result in wider[:1]]]
    if comparison.stage("modules").status is not Status.DIVERGED or found is None:
        return []
    result, rows = found
    metrics = result.metrics
    evidence = (
        f"{int(rows.sum())} of {len(rows)} rows are off by themselves; worst relative error {result.worst:.3g}, "
        f"rounding allows {result.tolerance:.3g}",
        f"max |d| {metrics.max_abs:.4g}, cosine {metrics.cosine:.6f}, {result.dtypes[0]} against {result.dtypes[1]}",
        *result.notes,
    )
    if _is_wider(result):
        return [_padded(comparison, result)]
    known = None if facts is None else cause_from_facts(comparison, result, rows, facts, evidence)
    module = result.point.module
    if known is not None:
        return [known]
    return [make_cause("module.unknown", stage="modules", module=module, confirmed=False, evidence=evidence)]


def _is_wider(result: PointResult) -> bool:
    is_output = result.point.direction == "output" and result.status is Status.DIVERGED
    return is_output and bool(result.notes) and "features in the rollout" in result.notes[0]


def _padded(comparison: Comparison, result: PointResult) -> Cause:
    """Rows of one place that are wider on one side: columns that only one side has."""
    logprobs = comparison.logprobs
    share, evidence = None, [result.notes[0]]
    if logprobs is not None and logprobs.rescored is not None:
        before = float(np.mean(np.abs(logprobs.difference)))
        share = max(0.0, 1 - logprobs.rescored / before) if before > 0 else None
        evidence.append(
            f"over the columns that both have, mean |Δ log p| is {logprobs.rescored:.3g} nats, recorded {before:.3g}"
        )
    head = (
        result.point.module.rpartition(".")[2] in ("lm_head", "output_layer") or result.point.part == "logits"
    )
    return make_cause(
        "head.padded_vocab" if head else "module.unknown",
        stage="modules",
        module=result.point.module,
        share=share,
        confirmed=share is not None and share > 0.9,
        evidence=evidence,
    )


def _routing(result: PointResult, flipped: int) -> Cause:
    """Whole numbers that a module gives are choices: other experts."""
    text = f"{flipped} of {len(result.errors)} rows choose other experts; what follows in these rows is a consequence"
    module = result.point.module
    return make_cause("moe.routing", stage="modules", module=module, confirmed=False, evidence=(text,))


def _batch_causes(comparison: Comparison) -> list[Cause]:
    """Rows that one side computed twice with other bits. Behind a module that is wrong this proves nothing."""
    off = [result for result in comparison.repeated if result.status is not Status.EQUAL]
    if not off or comparison.stage("modules").status is Status.DIVERGED:
        return []
    first = off[0]
    text = f"{module_label(first)}: {int((first.errors > 0).sum())} of {len(first.errors)} repeated rows changed, "
    text += f"max |d| {first.metrics.max_abs:.3g}"
    return [
        make_cause(
            "shape.batch",
            stage="batch_shape",
            module=first.point.module,
            confirmed=True,
            evidence=(text,),
        )
    ]
