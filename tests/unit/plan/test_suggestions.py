"""Random configurations: the numbers add up, and every suggestion is legal when it is applied."""

import json

from asking import SHORT, overrides_of, plan, question
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.plan.analyse import analyse
from trainfer.plan.asked import shown
from trainfer.plan.to_json import plan_document

RULES = st.sampled_from(["verl-0.6", "verl-0.9", "trainfer"])
SIZES = st.fixed_dictionaries(
    {
        "T": st.integers(1, 96),
        "n": st.integers(1, 8),
        "G": st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
        "M": st.integers(1, 96),
        "m": st.integers(1, 24),
        "L": st.integers(1, 24),
        "Lref": st.integers(1, 24),
        "TP": st.sampled_from([1, 1, 1, 2, 4]),
        "E": st.integers(1, 2),
        "SP": st.sampled_from([1, 1, 1, 2]),
        "kl": st.booleans(),
        "packed": st.just(True),
    },
    optional={
        "nodes": st.integers(1, 2),
        "dynamic": st.just(True),
        "tokens": st.sampled_from([512, 1024, 1500, 4096]),
        "Lr": st.sampled_from([256, 1024]),
        "agg": st.sampled_from(["token-mean", "seq-mean-token-mean", "nonsense"]),
    },
)


def planned(rules, sizes):
    sizes = dict(sizes)
    if rules == "trainfer":
        sizes.pop("packed")
        if sizes.get("agg") == "nonsense":
            del sizes["agg"]
        sizes["name"] = "vllm"
    else:
        sizes["mode"] = "async" if rules == "verl-0.9" else "sync"
    return plan(rules, **sizes), sizes


@given(RULES, SIZES)
@settings(deadline=None, max_examples=70)
def test_every_suggestion_is_legal_when_applied_and_touches_no_gpus(rules, sizes):
    bad, sizes = planned(rules, sizes)
    seen = set()
    for problem in bad.problems:
        for suggestion in problem.suggestions:
            assert not {SHORT["G"], SHORT["nodes"]} & set(suggestion)
            texts = tuple(f"{key}={shown(value)}" for key, value in suggestion.items())
            if texts in seen:
                continue
            seen.add(texts)
            cured = analyse(question([*overrides_of(**sizes), *texts]), rules)
            assert cured.ok, (texts, [p.message for p in cured.problems])
            assert not [p for p in cured.problems if p.when == "silent"]


@given(RULES, SIZES)
@settings(deadline=None, max_examples=70)
def test_the_numbers_add_up_and_nothing_is_lost(rules, sizes):
    result, _ = planned(rules, sizes)
    d = result.derived
    if not result.ok or any(problem.when == "silent" for problem in result.problems):
        return
    assert d.sequences_per_step == d.prompts_per_step * sizes["n"]
    assert d.sequences_per_rank * d.data_parallel_size == d.sequences_per_step + d.padding_sequences
    assert d.mini_batch_sequences_per_rank * d.mini_batches_per_epoch == d.sequences_per_rank
    assert d.optimizer_steps_per_step == sizes["E"] * d.mini_batches_per_epoch
    if "dynamic" not in sizes:
        missing = d.gradient_accumulation_steps * sizes["m"] - d.mini_batch_sequences_per_rank
        assert 0 <= missing < sizes["m"] if rules == "trainfer" else missing == 0
        if rules != "trainfer" or d.optimizer_steps_per_step > 1:
            assert 0 <= d.log_prob_forwards_per_rank * sizes["L"] - d.sequences_per_rank < sizes["L"]


@given(RULES, SIZES)
@settings(deadline=None, max_examples=50)
def test_the_document_is_strict_json_with_every_name(rules, sizes):
    result, _ = planned(rules, sizes)
    document = json.loads(json.dumps(plan_document(result), allow_nan=False, default=str))
    assert document["ok"] is (not any(p["severity"] == "error" for p in document["problems"]))
    assert None not in [
        document[key] for key in ("schema", "rules", "values", "derived", "problems", "alignment")
    ]
    assert len(document["derived"]) >= 15
    for number in document["derived"].values():
        assert number is None or isinstance(number, int) or set(number) == {"min", "max"}


def test_something_illegal_gets_a_suggestion_even_far_away():
    # 1000 x 7 over 64 GPUs with sizes that divide nothing: the mini-batch must be a multiple of 64.
    for rules in ("verl-0.6", "verl-0.9", "trainfer"):
        result = plan(rules, T=1000, n=7, G=64, M=300, m=13, L=9, kl=True, Lref=11, TP=1)
        assert not result.ok
        assert result.problems[0].suggestions, rules
