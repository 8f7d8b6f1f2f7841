"""Trials become causes with evidence, fix, kind of repair; the first divergence and the factor come from the replay."""

from dataclasses import replace

import numpy as np
import pytest

from trainfer.check.compare.records import STAGES, Comparison, Coverage, JoinedRows, Stage, Status, Verdict
from trainfer.check.explain.fixes import fixes
from trainfer.check.explain.verdict import explain
from trainfer.check.replay.records import ModuleReplay, NoiseFloor, Replay, Trial


def comparison(modules: Status = Status.DIVERGED) -> Comparison:
    stages = [
        Stage(name=name, status=modules if name == "modules" else Status.EQUAL, summary="") for name in STAGES
    ]
    return Comparison(
        stages=tuple(stages), rollout_sequences=(), train_sequences=(), tokens=(), weights=(), weights_order={},
        points=(), modules=(), repeated=(), logprobs=None, coverage=Coverage(rows_matched=3, modules_matched=2),
        introduced={},
    )  # fmt: skip


def module(name: str, order: int, introduced: list[float], *, floor: float = 1e-6) -> ModuleReplay:
    rows = JoinedRows(
        labels=np.array([0, 0, 1]), positions=np.array([4, 5, 4]), passes=np.array([0, 1, 0]),
        pass_names=("prefill", "decode"),
    )  # fmt: skip
    limit = NoiseFloor(
        operator="norm", dtype="F32", width=8, contraction=8, sequence=1, value=floor, variants=()
    )
    zero = np.zeros(3)
    return ModuleReplay(
        module=name, operator="norm", order=order, rows=rows, introduced_rollout=np.array(introduced),
        introduced_train=zero, inherited=zero, difference=np.array(introduced), floors=(limit, limit), leaf=True,
    )  # fmt: skip


def trial(**changes: object) -> Trial:
    made = Trial(
        cause="norm.eps", module="model.norm", side="rollout", parameters={"eps": 1e-5}, reproduced=True,
        error_before=0.02, error_after=1e-7, share_explained=0.8, modules=("model.norm",),
        evidence=("eps 1e-05 on this side, 1e-06 in the reference",),
        rejected=(("norm.precision", 0.97),), tokens=((0, 5),), floor=1e-6,
    )  # fmt: skip
    return replace(made, **changes)


def test_the_first_module_above_its_floor_is_the_first_divergence_with_its_rows():
    replay = Replay(
        modules=(module("late", 9, [1.0, 1.0, 1.0]), module("early", 2, [0.0, 1e-3, 0.0]), module("quiet", 1, [9e-7] * 3)),
        not_replayed={},
    )  # fmt: skip
    first = explain(comparison(), replay=replay).first_divergence
    assert first is not None
    assert (first.module, first.tokens, first.pass_name) == ("early", ((0, 5),), "decode")


def test_everything_inside_its_floor_is_rounding_with_the_factor():
    replay = Replay(modules=(module("a", 1, [2e-7, 0, 0]), module("b", 2, [5e-7, 0, 0])), not_replayed={})
    found = explain(comparison(Status.ROUNDING), replay=replay)
    assert found.verdict is Verdict.ROUNDING
    assert "at most 0.50 times its measured noise floor (b)" in found.why
    assert found.causes == ()


def test_a_trial_is_a_cause_with_numbers_fix_kind_and_what_was_excluded():
    replay = Replay(modules=(module("model.norm", 1, [0.02, 0, 0]),), not_replayed={}, trials=(trial(),))
    cause = explain(comparison(), replay=replay).causes[0]
    assert (cause.cause, cause.module, cause.confirmed, cause.share_explained) == (
        "norm.eps",
        "model.norm",
        True,
        0.8,
    )
    assert "the rollout side introduces an error of up to 0.02" in cause.evidence[0]
    assert "2e+04 times what rounding may" in cause.evidence[0]
    assert cause.excluded == ("norm.precision: leaves 97% of the error",)
    assert cause.repair == "configuration"
    assert {"verl", "vLLM", "Transformers", "trainfer"} == set(cause.places)


def test_what_nothing_reproduces_is_unknown_and_sends_deeper_not_further():
    unknown = trial(cause="module.unknown", reproduced=False, evidence=(), module="model.layers.0.mlp")
    replay = Replay(
        modules=(module("model.layers.0.mlp", 1, [0.02, 0, 0]),), not_replayed={}, trials=(unknown,)
    )
    found = explain(comparison(), replay=replay)
    assert (found.causes[0].cause, found.causes[0].confirmed) == ("module.unknown", False)
    assert any('modules=["model.layers.0.mlp"]' in step for step in found.next_steps)


def test_kinds_of_repair_stay_apart_and_stacked_causes_keep_their_order():
    second = trial(cause="attention.backend", module="model.layers.1.self_attn", share_explained=0.1)
    replay = Replay(
        modules=(module("model.norm", 1, [0.02, 0, 0]),), not_replayed={}, trials=(trial(), second)
    )
    found = explain(comparison(), replay=replay)
    assert [cause.cause for cause in found.causes] == ["norm.eps", "attention.backend"]
    kinds = [(repair.kind, repair.cause) for repair in found.repairs]
    assert kinds == [("configuration", "norm.eps"), ("execution", "attention.backend"), ("execution", "")]


DESIGN = [
    "tokens.retokenized",
    "tokens.shifted",
    "tokens.inserted",
    "tokens.wrong_sample",
    "tokens.truncated",
    "tokens.packing_roll",
    "tokens.template",
    "weights.stale",
    "weights.missing",
    "weights.tied_head",
    "weights.fused_copy",
    "weights.buffer",
    "weights.adapter_missing",
    "weights.adapter_scale",
    "weights.rounded_merge",
    "weights.cached_copy",
    "rope.scaling",
    "rope.dtype",
    "rope.positions",
    "attention.mask",
    "attention.window",
    "attention.cross_sequence",
    "attention.softcap",
    "attention.merge",
    "attention.backend",
    "norm.eps",
    "norm.cast_order",
    "norm.precision",
    "head.dtype",
    "head.padded_vocab",
    "head.adapter",
    "kv_cache.stale_prefix",
    "kv_cache.quantized",
    "kv_cache.seam",
    "moe.routing",
    "mode.dropout",
    "logprob.temperature",
    "logprob.filtered",
    "logprob.scaled_after_softmax",
    "logprob.path",
    "shape.batch",
    "shape.parallel",
    "policy.staleness",
    "module.unknown",
]


@pytest.mark.parametrize("cause", DESIGN)
def test_every_cause_of_the_design_has_a_fix_and_a_kind(cause: str):
    fix = fixes()[cause]
    assert len(fix.fix) > 20
    assert fix.repair in ("configuration", "execution", "objective")
