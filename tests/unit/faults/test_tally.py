"""Scores are what they say: shares over defined cases, counted apart from noise, targets held."""

import json

import pytest

from trainfer.errors import ConfigError
from trainfer.faults import show
from trainfer.faults.answer import alarm_of, score_case
from trainfer.faults.catalogue import FAULTS, chosen_faults, make_case
from trainfer.faults.records import Answer, Batch, Case, ControlOutcome, Expected, Outcome, Scores
from trainfer.faults.tally import Share, tally

BATCH = Batch(tokens=((1, 2, 3, 4), (5, 6, 7)), prompt_lengths=(2, 1))


def case(cause: str = "norm.eps", magnitude: float | None = None) -> Case:
    return Case(fault=f"{cause}/x", cause=cause, seed=0, architecture="llama", dtype="float32", side="train", layer=1,
                magnitude=magnitude)  # fmt: skip


def answer(**changes) -> Answer:
    given = {
        "verdict": "diverged", "stage": "modules", "module": "a", "tokens": frozenset(), "causes": ("norm.eps",),
        "ranked": ("a", "b", "c", "d"), "shares": (0.9,), "confirmed": (True,), "first_step": None, "abs_diff_mean": 0.1,
        "text": "",
    }  # fmt: skip
    return Answer(**{**given, **changes})


def score(expected: list[Expected], said: Answer, **changes) -> Outcome:
    sizes = {"gap": 0.1, "noise": 0.01, "seconds": 1.0, **changes}
    return score_case(case(magnitude=0.1), expected, said, BATCH, **sizes)


def test_rows_are_those_that_both_sides_run():
    assert BATCH.rows() == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert BATCH.rows(start=1) == {(0, 1), (0, 2), (1, 1)}
    assert BATCH.responses() == {(0, 2), (0, 3), (1, 1), (1, 2)}


@pytest.mark.parametrize(
    ("module", "top1", "top3"),
    [("a", True, True), ("c", False, True), ("d", False, False), ("z", False, False)],
)
def test_the_module_is_right_first_or_among_three(module: str, top1: bool, top3: bool):
    outcome = score([Expected(cause="norm.eps", modules=(module,))], answer())
    assert (outcome.top1, outcome.top3) == (top1, top3)


def test_a_cause_without_a_module_has_no_module_score():
    outcome = score([Expected(cause="logprob.temperature")], answer(causes=("logprob.filtered",)))
    assert (outcome.top1, outcome.family, outcome.exact) == (None, True, False)


def test_only_the_first_cause_counts_where_one_was_planted():
    assert not score([Expected(cause="norm.eps")], answer(causes=("rope.dtype", "norm.eps"))).family
    assert score([Expected(cause="norm.eps")], answer(causes=("shape.batch", "norm.eps"))).family


def test_of_a_stack_every_family_must_be_named():
    planted = [Expected(cause="norm.eps"), Expected(cause="head.dtype")]
    assert not score(planted, answer()).family
    assert score(planted, answer(causes=("norm.eps", "head.dtype"))).exact


def test_tokens_are_intersection_over_union():
    expected = Expected(cause="norm.eps", tokens=lambda batch: {(0, 0), (0, 1), (0, 2)})
    said = answer(tokens=frozenset({(0, 1), (0, 2), (1, 0)}))
    assert score([expected], said).tokens == pytest.approx(2 / 4)


def test_a_fault_below_three_times_the_noise_does_not_count():
    assert not score([Expected(cause="norm.eps")], answer(), gap=0.029).counted
    assert score([Expected(cause="norm.eps")], answer(), gap=0.031).counted


def test_alarms():
    assert not alarm_of(answer(verdict="rounding", causes=("shape.batch",)), ())
    assert alarm_of(answer(verdict="rounding", causes=("norm.cast_order",)), ()) == "cause norm.cast_order"
    assert alarm_of(answer(causes=()), ()) == "verdict diverged at modules a"
    assert not alarm_of(answer(verdict="incomparable", causes=("policy.staleness",)), ("policy.staleness",))
    assert (
        alarm_of(answer(verdict="rounding", causes=()), ("policy.staleness",)) == "policy.staleness not named"
    )


def scores() -> Scores:
    right = score([Expected(cause="norm.eps", modules=("a",))], answer())
    wrong = score([Expected(cause="rope.dtype", modules=("z",))], answer())
    quiet = score([Expected(cause="rope.dtype")], answer(verdict="rounding", causes=(), ranked=()), gap=0.01)
    control = ControlOutcome(name="N1 residual in two parts", seed=0, alarm="", answer=None, seconds=0.1)
    return Scores(outcomes=(right, wrong, quiet), controls=(control,), seeds=1, seconds=2.0)


def test_shares_are_over_counted_cases_and_targets_are_held():
    result = tally(scores())
    assert result.total.top1 == Share(right=1, of=2)
    assert result.total.family == Share(right=1, of=2)
    assert (result.below.cases, result.below.found, result.below.quiet, result.below.wrong) == (1, 0, 1, 0)
    assert [(band.name, band.cases) for band in result.bands] == [("1× to 3×", 1), ("10× to 100×", 2)]
    assert result.missed == ("module top-1 50.0% of 2 (target 95%)", "cause family 50.0% of 2 (target 90%)")


def test_the_page_and_the_json_name_what_fails():
    page = show.markdown(scores())
    assert "planted rope.dtype at z; said diverged, norm.eps, a" in page
    assert "| N1 residual in two parts |" in page
    data = json.loads(show.as_json(scores()))
    assert data["schema"] == "trainfer.faults/1"
    assert data["ok"] is False
    assert data["total"]["top1"] == 0.5
    assert [item["family"] for item in data["cases"]] == [True, False, False]


DESIGN_IDS = [
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
    "attention.scale",
    "module.dtype",
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


def test_every_cause_of_the_design_is_planted():
    assert set(DESIGN_IDS) == {
        fault.cause for fault in FAULTS.values() if not fault.cause.startswith("stack.")
    }


def test_cases_are_the_same_each_time_and_walk_through_sizes():
    fault = FAULTS["norm.eps/one"]
    assert make_case(fault, 3) == make_case(fault, 3)
    assert [make_case(fault, seed).magnitude for seed in range(5)] == list(fault.magnitudes)
    sides = {make_case(fault, seed).side for seed in range(20)}
    assert sides == {"rollout", "train"}


def test_a_choice_that_names_nothing_is_one_message():
    assert {fault.cause for fault in chosen_faults("rope")} == {
        "rope.scaling",
        "rope.dtype",
        "rope.positions",
    }
    with pytest.raises(ConfigError, match=r"--only ropes: no fault of the suite; one of attention\.backend"):
        chosen_faults("ropes")
