"""The plan against what verl's own functions answered to 183 sets of sizes, for each release.

``tests/golden/make_plan_golden.py`` says what was called; it runs in verl's environment and writes the JSON.
"""

import json
from pathlib import Path

import pytest
from asking import overrides_of, question, upstream

from trainfer.plan.analyse import analyse

GOLDEN = Path(__file__).parents[2] / "golden"
OLD = json.loads((GOLDEN / "verl_plan_0.6.1.json").read_text())
NEW = json.loads((GOLDEN / "verl_plan_0.9.1.json").read_text())
TP1 = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"


def ids(case):
    return " ".join(f"{name}{value}" for name, value in case["sizes"].items() if name != "adv")


def planned(case, rules):
    return analyse(question([*overrides_of(**case["sizes"]), TP1]), rules, with_suggestions=False)


@pytest.mark.parametrize(("rules", "golden"), [("verl-0.6", OLD), ("verl-0.9", NEW)], ids=["0.6.1", "0.9.1"])
def test_the_configuration_check_says_what_verl_says(rules, golden):
    compared = 0
    for case in golden["cases"]:
        said = case["validate"]
        if said is not None and ("vllm version None" in said or "Repo id" in said):
            continue  # verl asked for vLLM or a model, which its environment did not have
        result = planned(case, rules)
        if said is None:
            assert not [p for p in result.problems if p.when == "config" and p.severity == "error"], ids(case)
        else:
            assert said in upstream(result), (ids(case), said, upstream(result))
        compared += 1
    assert compared >= 180


def test_06_normalises_and_refuses_as_its_worker_does():
    refused = 0
    for case in OLD["cases"]:
        result = planned(case, "verl-0.6")
        if case["init"] is not None:
            refused += 1
            assert case["init"] in upstream(result), (ids(case), case["init"], upstream(result))
        elif "mini_rows" in case:
            assert result.derived.mini_batch_sequences_per_rank == case["mini_rows"], ids(case)
            if not case["sizes"].get("dynamic"):
                assert result.derived.micro_batch_sequences_per_rank == case["micro_rows"], ids(case)
    assert refused >= 50


def test_06_splits_as_verl_splits():
    compared = 0
    for case in OLD["cases"]:
        numbers = planned(case, "verl-0.6").derived
        if "mini_batches" in case:
            assert numbers.mini_batches_per_epoch == len(case["mini_batches"]), ids(case)
            compared += 1
        if "log_prob_forwards" in case and not case["sizes"].get("dynamic"):
            assert numbers.log_prob_forwards_per_rank == case["log_prob_forwards"], ids(case)
    assert compared >= 30


def test_06_equal_chunks_have_verls_words():
    for case in OLD["cases"]:
        sizes = {**case["sizes"], "G": 1, "nodes": 1, "SP": 1, "M": 1, "m": 1, "L": 1}
        texts = [*overrides_of(**sizes), TP1, "actor_rollout_ref.rollout.mode=async"]
        said = [
            text
            for text in upstream(analyse(question(texts), "verl-0.6", with_suggestions=False))
            if "equal chunk" in text
        ]
        assert said == ([case["chunk_8"]] if case["chunk_8"] else []), ids(case)


def test_09_pads_and_refuses_as_verl_does():
    refused = 0
    for case in NEW["cases"]:
        if "padding" not in case:
            continue
        result = planned(case, "verl-0.9")
        assert result.derived.padding_sequences == case["padding"], ids(case)
        assert result.derived.sequences_per_rank == case["rows"], ids(case)
        told = upstream(result)
        for name in ("mini", "micro", "log_prob"):
            if case.get(name) is not None:
                refused += 1
                assert case[name] in told, (ids(case), name)
        if case.get("micro_batches"):
            assert result.derived.gradient_accumulation_steps == case["micro_batches"], ids(case)
        if case.get("log_prob_batches"):
            assert result.derived.log_prob_forwards_per_rank == case["log_prob_batches"], ids(case)
    assert refused >= 100


@pytest.mark.parametrize(("rules", "golden"), [("verl-0.6", OLD), ("verl-0.9", NEW)], ids=["0.6.1", "0.9.1"])
def test_dynamic_micro_batches_lie_in_the_span(rules, golden):
    for split in golden["dynamic"]:
        rows, width = len(split["lengths"]), split["width"]
        sizes = {"T": rows, "n": 1, "G": 1, "M": rows, "dynamic": True, "tokens": split["budget"]}
        result = analyse(
            question([*overrides_of(**sizes, Lp=width - 1, Lr=1), TP1]), rules, with_suggestions=False
        )
        if split["message"] is not None:
            assert split["message"].replace("max_seq_len=tensor(64)", "max_seq_len=64") in upstream(result)
            continue
        span = result.derived.gradient_accumulation_steps
        low, high = (span, span) if isinstance(span, int) else (span.min, span.max)
        assert low <= split["micro_batches"] <= high
        if set(split["lengths"]) == {width}:
            assert split["micro_batches"] == high
