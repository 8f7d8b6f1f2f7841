"""The plan's numbers are counted in real runs of 1, 2 and 4 ranks: sequences, forwards, backwards, optimizer steps."""

import json
import subprocess
import sys

import plan_counts
import pytest
from plan_counts import GENERATE, OLD, OTHER, REF, UPDATE, Event, draw_plans, overrides, prepare, run_plans

from trainfer.config.load import load_config
from trainfer.errors import PlanError
from trainfer.exact import packed
from trainfer.plan import numbers_trainfer
from trainfer.workers.session import open_session

CHOSEN = {
    "one mini-batch": {"T": 4, "n": 3, "M": 4, "m": 4, "L": 5, "kl": True, "Lref": 3},
    "epochs and a ragged micro-batch": {"T": 4, "n": 2, "M": 2, "m": 3, "L": 8, "E": 2},
    "by tokens": {"T": 6, "n": 2, "M": 3, "tokens": 64, "kl": True},
    "two mini-batches": {"T": 2, "n": 5, "M": 1, "m": 5, "L": 1},
    "all tokens, as verl writes it": {"T": 2, "n": 2, "M": 2, "m": 8, "top_k": 0},
    "the rollout's log-probs in the reward": {
        "T": 2,
        "n": 2,
        "M": 1,
        "m": 1,
        "bypass": True,
        "kl_reward": True,
    },
    "a shard group larger than the world": {"T": 2, "n": 2, "M": 2, "m": 3, "fsdp": 8},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


def told_by(prepared, folder, plans, num_ranks, timeout_s=300):
    """One step of each plan on the same processes: what its run folder's plan says and what each rank did."""
    arguments = [overrides(prepared, folder / f"run_{n}", sizes) for n, sizes in enumerate(plans)]
    (folder / "plans.json").write_text(json.dumps(arguments))
    if num_ranks == 1:
        run_plans(folder, None)
    else:
        ended = subprocess.run(
            [sys.executable, plan_counts.__file__, str(folder), str(num_ranks), str(timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        logs = "".join(log.read_text() for log in folder.glob("logs/*"))
        assert ended.returncode == 0, ended.stdout[-3000:] + logs[-3000:]
    return json.loads((folder / "told.json").read_text())


def within(number, planned):
    return planned["min"] <= number <= planned["max"] if isinstance(planned, dict) else number == planned


def check_as_planned(told, sizes):
    derived, step = told["derived"], told["step"]
    ranks = [[Event(**event) for event in events] for events in told["ranks"]]
    sharing = step["sequence_parallel_size"]
    assert len(ranks) == derived["num_gpus"] == derived["data_parallel_size"] * sharing, sizes
    assert len(ranks) == derived["rollout_replicas"], sizes
    rows = rows_on_a_rank(told["tensors"], sharing)
    for events in ranks:
        check_rank(derived, step, events, sizes)
        assert rows.keys() == {event.stage for event in events if event.what == "forward"}, sizes
        for event in events:
            assert event.what != "forward" or event.rows <= rows[event.stage], (event, rows, sizes)
    for first in range(0, len(ranks), sharing):
        computed = [event for event in ranks[first] if event.stage != GENERATE]
        for other in ranks[first : first + sharing]:
            assert [event for event in other if event.stage != GENERATE] == computed, sizes
    sampled = [event for events in ranks for event in events if event.what == "completions"]
    assert num_sequences(sampled) == derived["sequences_per_step"], sizes
    leading = [event for events in ranks[::sharing] for event in events]
    whole = derived["sequences_per_step"] + derived["padding_sequences"]
    trained = [event for event in leading if event.stage == UPDATE]
    assert num_sequences(trained) == step["ppo_epochs"] * whole, sizes


def rows_on_a_rank(tensors, sharing):
    """By stage, the most rows that the plan's table of tensors gives one forward."""
    ending = ", one micro-batch" + (f", one GPU of {sharing}" if sharing > 1 else "")
    return {
        stage: int(tensor["shape"][1].removeprefix("≤ "))
        for stage, name in ((OLD, "old log-probs"), (REF, "reference log-probs"), (UPDATE, "update"))
        for tensor in tensors
        if tensor["stage"] == name + ending
    }


def check_rank(derived, step, events, sizes):
    of = {stage: [e for e in events if e.stage == stage] for stage in (GENERATE, OLD, REF, UPDATE, OTHER)}
    assert not of[OTHER], sizes
    assert within(num_sequences(of[GENERATE]), derived["sequences_per_replica"]), sizes
    for stage, forwards in ((OLD, "log_prob_forwards_per_rank"), (REF, "ref_log_prob_forwards_per_rank")):
        assert {event.what for event in of[stage]} <= {"forward"}, sizes
        assert within(len(of[stage]), derived[forwards]), (stage, sizes)
        asked = derived["sequences_per_rank"] if derived[forwards] != 0 else 0
        assert num_sequences(of[stage]) == asked, (stage, sizes)
        check_limits(of[stage], step, f"{stage_prefix(stage)}log_prob_micro_batch", sizes)
    steps = optimizer_steps(of[UPDATE])
    assert len(steps) == derived["optimizer_steps_per_step"] == step["optimizer_steps_per_step"], sizes
    assert len(steps) == derived["mini_batches_per_epoch"] * step["ppo_epochs"], sizes
    for events_of_step in steps:
        forwards = events_of_step[::2]
        assert [event.what for event in events_of_step] == ["forward", "backward"] * len(forwards), sizes
        assert within(len(forwards), derived["gradient_accumulation_steps"]), sizes
        assert num_sequences(forwards) == derived["mini_batch_sequences_per_rank"], sizes
        planned = derived["micro_batch_sequences_per_rank"]
        assert all(within(len(event.lengths), planned) for event in forwards), sizes
        check_limits(forwards, step, "micro_batch", sizes)


def check_limits(forwards, step, name, sizes):
    """What the configuration allows a forward to hold."""
    sequences, tokens = step[f"{name}_sequences_per_rank"], step[f"{name}_tokens_per_rank"]
    for event in forwards:
        assert 0 < max(event.lengths) <= step["max_sequence_tokens"], sizes
        if sequences is None:
            assert sum(event.lengths) <= tokens, (event, sizes)
        else:
            assert len(event.lengths) <= sequences, (event, sizes)


def stage_prefix(stage):
    return "ref_" if stage == REF else ""


def num_sequences(events):
    return sum(len(event.lengths) for event in events)


def optimizer_steps(events):
    """What came before each optimizer step."""
    steps = [[]]
    for event in events:
        if event.what == "optimizer step":
            steps.append([])
        else:
            steps[-1].append(event)
    assert not steps[-1], "a backward without an optimizer step"
    return steps[:-1]


@pytest.mark.parametrize("name", CHOSEN)
def test_what_the_plan_says_is_what_runs(prepared, tmp_path, name):
    [told] = told_by(prepared, tmp_path, [CHOSEN[name]], 1)
    assert told["ranks"][0]
    check_as_planned(told, CHOSEN[name])


def check_random_plans(prepared, folder, num_ranks, *, seed, count):
    legal, refused = draw_plans(seed, num_ranks, count, prepared)
    assert refused
    all_told = told_by(prepared, folder, legal, num_ranks)
    for sizes, told in zip(legal, all_told, strict=True):
        check_as_planned(told, sizes)
    return legal


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_random_legal_plans_are_what_runs(prepared, tmp_path, num_ranks):
    check_random_plans(prepared, tmp_path, num_ranks, seed=1, count=8)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_many_random_legal_plans_are_what_runs(prepared, tmp_path, num_ranks):
    plans = check_random_plans(prepared, tmp_path, num_ranks, seed=2, count=60)
    assert {sizes["SP"] for sizes in plans} == ({1} if num_ranks == 1 else {1, 2})


@pytest.mark.parametrize("what", ["forward", "backward", "optimizer step", "completions"])
@pytest.mark.parametrize("change", ["missing", "twice"])
def test_a_count_that_differs_is_noticed(prepared, tmp_path, what, change):
    sizes = CHOSEN["epochs and a ragged micro-batch"]
    [told] = told_by(prepared, tmp_path, [sizes], 1)
    [events] = told["ranks"]
    index = max(index for index, event in enumerate(events) if event["what"] == what)
    events[index : index + 1] = [events[index]] * (2 if change == "twice" else 0)
    with pytest.raises(AssertionError):
        check_as_planned(told, sizes)


def test_the_plan_knows_the_rows_that_dummies_fill_up():
    assert numbers_trainfer.ROW_MULTIPLE == packed.ROW_MULTIPLE


def test_what_the_plan_refuses_does_not_start(prepared, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(PlanError, match="not whole mini-batches"):
        open_session(load_config(None, overrides(prepared, run, {"T": 4, "n": 2, "M": 3, "m": 2})))
    assert not run.exists()


def test_the_run_folder_holds_the_plan_document(prepared, tmp_path):
    run = tmp_path / "run"
    with open_session(load_config(None, overrides(prepared, run, {"T": 4, "n": 2, "M": 4, "m": 4}))):
        document = json.loads((run / "plan.json").read_text())
    assert (document["schema"], document["rules"], document["ok"]) == ("trainfer.plan/1", "trainfer", True)
    assert document["derived"]["sequences_per_step"] == document["step"]["sequences_per_step"] == 8
    assert document["values"]["data.train_batch_size"] == {"value": 4, "source": "override"}
