"""Each plant of the third set runs and does what it says: other tokens, other weights, or other log-probs.

No comparison is asked here: these tests know nothing of causes.
"""

import dataclasses

import pytest

from trainfer.faults.catalogue import layout_of, make_case
from trainfer.faults.generators import Generator, controls_of, faults_of
from trainfer.faults.pair import Pair, make_pair
from trainfer.faults.records import Case, Expected
from trainfer.faults.sides import Recorded, mean_gap, run_pair
from trainfer.faults.suite import clean_noise

FAULTS = faults_of(Generator.THIRD)
Steps = list[tuple[Recorded, Recorded]]


def _planted(name: str) -> tuple[Case, Pair, list[Expected], Steps]:
    """The fault at seed 0, in float32 where it can be."""
    fault = FAULTS[name]
    case = make_case(fault, 0)
    if "float32" in fault.dtypes:
        case = dataclasses.replace(case, dtype="float32")
    pair = make_pair(case, layout=layout_of(fault, 0))
    expected = list(fault.plant(pair))
    return case, pair, expected, run_pair(pair)


@pytest.mark.parametrize("name", FAULTS)
def test_a_plant_changes_what_it_says(name: str) -> None:
    case, pair, expected, steps = _planted(name)
    rollout, train = steps[-1]

    assert [item.cause for item in expected] == [case.cause]
    known = dict(pair.clean.named_modules())
    assert all(module in known for item in expected for module in item.modules)
    if pair.train.edit is not None:
        assert train.batch.tokens != rollout.batch.tokens
        return
    assert train.batch == rollout.batch
    least = 10 if case.dtype == "float32" else 0.5
    assert mean_gap(steps) > least * clean_noise(case, pair.train.layout)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if "bfloat16" in fault.dtypes])
def test_a_plant_runs_in_bfloat16(name: str) -> None:
    case = dataclasses.replace(make_case(FAULTS[name], 1), dtype="bfloat16")
    pair = make_pair(case, layout=layout_of(FAULTS[name], 1))

    FAULTS[name].plant(pair)

    assert all(step[0].logprobs and step[1].logprobs for step in run_pair(pair))


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("weights.")])
def test_a_weights_plant_leaves_other_parameters(name: str) -> None:
    _, pair, _, _ = _planted(name)
    mine = {key: value for key, value in pair.rollout_model.state_dict().items() if "lora_" not in key}
    theirs = pair.train_model.state_dict()
    same = [key for key, value in mine.items() if key in theirs and bool((theirs[key] == value).all())]

    if name.startswith(("weights.cached_copy", "weights.buffer")):
        assert len(same) == len(mine)
    else:
        assert len(same) < len(mine)


def test_tokens_that_a_fault_touches_lie_in_the_batch() -> None:
    for name in FAULTS:
        if name.partition("/")[0] in (
            "rope.positions",
            "attention.window",
            "kv_cache.stale_prefix",
            "kv_cache.seam",
        ):
            _, _, expected, steps = _planted(name)
            batch = steps[-1][0].batch
            assert expected[0].tokens is not None
            touched = expected[0].tokens(batch)
            assert touched
            assert touched < batch.rows()


def test_names_do_not_meet_and_causes_are_many() -> None:
    others = faults_of(Generator.BOTH)

    assert not set(FAULTS) & set(others)
    assert len(FAULTS) >= 32
    assert len({fault.cause for fault in FAULTS.values()}) >= 24
    assert len({cause.partition(".")[0] for cause in (fault.cause for fault in FAULTS.values())}) == 12
    assert not {item.name for item in controls_of(Generator.THIRD)} & {
        item.name for item in controls_of(Generator.BOTH)
    }
