"""Whole stock runs of verl 0.6.1 under ``trainfer attach``: every row agrees, in mode sync and in mode async.

About a minute a run on free cores; ``make test-verl061`` runs them.
"""

import pytest
from verl061_runs import ASYNC, PACKED, python, run

from trainfer.check.dump.reader import Dump
from trainfer.integrations.attached import sync_proofs

pytestmark = [pytest.mark.verl, pytest.mark.timeout(3000)]
SEQUENCES = 8
"""Four prompts, two samples each."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by name; each happens once."""
    if not python().exists():
        pytest.skip(f"{python()} is not there: make setup-verl061")
    folder, done = tmp_path_factory.mktemp("verl061"), {}

    def start(name, **arguments):
        if name not in done:
            done[name] = run(folder, name, **arguments)
        return done[name]

    return start


@pytest.fixture(scope="module", params=["sync", "async"])
def ended(request, runs):
    """Padded rows in mode sync, packed ones in mode async."""
    overrides = () if request.param == "sync" else (*ASYNC, *PACKED)
    return runs(request.param, overrides=overrides)


def _sequences(ended, step):
    return list(Dump(ended.out / f"step_{step}" / "rollout" / "engine-0").sequences(0))


@pytest.mark.parametrize("pass_name", ["old_log_prob", "update"])
@pytest.mark.parametrize("step", [0, 1])
def test_all_rows_of_a_stock_run_agree(ended, step, pass_name):
    assert ended.code == 0, ended.printed[-4000:]
    result = ended.result(step, pass_name)
    stages = {stage["name"]: stage["status"] for stage in result["stages"]}
    assert result["verdict"] in ("equal", "rounding"), result["stages"]
    assert stages["tokens"] == "equal"
    assert stages["weights"] == "equal"
    sequences, coverage = _sequences(ended, step), result["coverage"]
    assert len(sequences) == SEQUENCES
    assert coverage["rows_train"] == sum(len(s.tokens) for s in sequences)
    # The rollout never computes a response's last token: every other row of prompt and response has its partner.
    assert coverage["rows_matched"] == coverage["rows_rollout"] == coverage["rows_train"] - SEQUENCES
    assert coverage["modules_matched"] > 20
    assert result["logprobs"]["count"] == sum(len(s.tokens) - s.prompt_length for s in sequences)
    assert result["logprobs"]["abs_diff_max"] < 1e-4
    assert [c["cause"] for c in result["causes"] if not c["cause"].startswith("shape.")] == []


def test_rollout_saw_prefill_and_decode(ended):
    rollout = Dump(ended.out / "step_0" / "rollout" / "engine-0")
    assert {call.pass_name for call in rollout.calls(0).values()} >= {"prefill", "decode"}
    assert rollout.complete


def test_every_sync_is_proven_and_the_weights_moved(ended):
    proofs = list(sync_proofs(ended.out))
    assert [proof.version for proof in proofs] == [0, 1]
    assert all(proof.holds for proof in proofs)
    fingerprints = {}
    for record in Dump(ended.out / "weights" / "train").weights(0):
        fingerprints.setdefault(record.name, set()).add(record.fingerprint)
    assert all(len(found) == 2 for found in fingerprints.values())


def test_nothing_went_wrong_in_any_process(ended):
    told = [line for line in ended.printed.splitlines() if "(the run goes on)" in line]
    assert told == []
