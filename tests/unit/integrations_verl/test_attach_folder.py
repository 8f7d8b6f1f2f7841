"""The folder of an attached run: parts of a side read as one, steps judged, syncs proven; a ref pass never judged."""

import pytest
import torch
from torch import nn

from trainfer.check.dump.reader import Dump
from trainfer.check.probe.capture import capture
from trainfer.cli.attach_verdict import conclude
from trainfer.errors import DumpError
from trainfer.integrations.attached import step_passes, sync_proofs
from trainfer.integrations.dumps import compare, open_side
from trainfer.integrations.parts import PartsSide
from trainfer.integrations.verl import requests, sync_proof
from trainfer.integrations.verl import session as sessions
from trainfer.integrations.verl.journal import Journal
from trainfer.integrations.verl.requests import Sampled, record_request
from trainfer.integrations.verl.session import Session, session
from trainfer.integrations.verl.settings import VARIABLE, AttachSettings

SEQUENCES = [[5, 6, 7, 8], [5, 6, 9, 9]]


class Toy(nn.Module):
    """Embedding and head: a row depends on its token alone."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def _logprobs(model, temperature=1.0):
    logits = model(torch.tensor(SEQUENCES)).detach() / temperature
    scored = logits.log_softmax(-1)[:, :-1].gather(2, torch.tensor(SEQUENCES)[:, 1:, None])[..., 0]
    return scored[:, 1:].tolist()


@pytest.fixture
def state(tmp_path, monkeypatch):
    """This process as one of an attached run."""
    settings = AttachSettings(
        out=str(tmp_path / "out"), verl="0.9.1", run_id="r", steps=(0,), max_bytes=2**30
    )
    monkeypatch.setenv(VARIABLE, settings.encode())
    for cached in (session, requests._dump, sync_proof._dump):
        cached.cache_clear()
    (tmp_path / "out").mkdir()
    yield session()
    for cached in (session, requests._dump, sync_proof._dump):
        cached.cache_clear()


def _fill(state, rollout, train, *, version=0):
    """One step of a run whose rollout and trainer are two models."""
    folder = state.settings.rollout_folder(0)
    with capture(rollout, folder / "engine-0", side="rollout", weights_version=version) as opened:
        rollout(input_ids=torch.tensor(SEQUENCES)[:, :-1])
        assert opened is not None
    for number, (tokens, values) in enumerate(zip(SEQUENCES, _logprobs(rollout), strict=True)):
        record_request(
            state,
            Sampled(
                request=str(number), prompt=tokens[:2], response=tokens[2:], logprobs=values,
                params={"temperature": 1.0}, logprobs_mode="processed_logprobs", step=0, replica=0,
            ),
        )  # fmt: skip
    for name, model in (("old_log_prob", train), ("ref_log_prob", Toy(seed=9))):
        opened = state.begin_pass(name, model)
        model(input_ids=torch.tensor(SEQUENCES))
        opened.record(
            sequences=SEQUENCES,
            prompt_lengths=[2, 2],
            logprobs=_logprobs(model),
            sampling={"temperature": 1.0},
        )
        state.end_pass()


def test_parts_are_one_side_and_the_step_agrees(state):
    model = Toy()
    _fill(state, model, model)
    (pair,) = step_passes(state.settings.folder)
    assert (pair.step, pair.pass_name) == (0, "old_log_prob")
    side = open_side(pair.rollout)
    assert isinstance(side, PartsSide)
    assert len(side.ranks) == 2
    assert side.manifest.model_class == "Toy"
    assert side.manifest.complete
    result = compare(pair.rollout, pair.train)
    assert result.verdict in ("equal", "rounding")
    assert result.comparison.coverage.rows_matched > 0


def test_another_model_in_the_rollout_is_found_and_ends_the_command_with_1(state, capsys):
    _fill(state, Toy(seed=1), Toy(seed=2))
    assert conclude(state.settings, 0) == 1
    printed = capsys.readouterr().out
    assert "rollout against old_log_prob" in printed
    assert "ref_log_prob" not in printed
    assert (state.settings.folder / "step_0" / "report-old_log_prob" / "report.html").is_file()


def test_a_command_that_failed_keeps_its_exit_code(state):
    model = Toy()
    _fill(state, model, model)
    assert conclude(state.settings, 7) == 7


def test_an_empty_folder_is_not_good_news(state, capsys):
    assert conclude(state.settings, 0) == 2
    assert "nothing was captured" in capsys.readouterr().err


def test_a_sync_is_proven_for_every_version_and_a_parameter_left_behind_is_named(state):
    model = Toy()
    state.synced(10)
    sync_proof.train_weights(state, model, "float32")
    held = _rollout_dump(state)
    _hold(state, held, model)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    state.synced(11)
    assert state.step == 1
    sync_proof.train_weights(state, model, "float32")
    _hold(state, held, Toy())  # the old weights again
    held.mark()
    held.close()
    sync_proof._dump("train", "train", 0, 1, "Toy").close()
    first, second = sync_proofs(state.settings.folder)
    assert first.holds
    assert first.compared == 2
    assert second.differing == ("head.weight",)


def test_weights_are_rounded_to_the_rollouts_dtype_before_they_are_proven(state):
    model = Toy()
    state.synced(0)
    sync_proof.train_weights(state, model, "bfloat16")
    held = _rollout_dump(state)
    _hold(state, held, Toy().to(torch.bfloat16))
    held.close()
    sync_proof._dump("train", "train", 0, 1, "Toy").close()
    (proof,) = sync_proofs(state.settings.folder)
    assert proof.holds


def _rollout_dump(state):
    return sync_proof._dump("rollout-0", "rollout", 0, 1, "Toy")


def _hold(state, dump, model):
    from trainfer.check.probe.weights import WeightWatcher

    WeightWatcher(model, dump.writer, sync_proof._sink(dump), full=False).write(
        step=state.step, version=state.step
    )


def test_an_optimizer_step_moves_the_version_and_a_write_that_changes_nothing_does_not(state):
    model = Toy()
    opened = state.begin_pass("update", model, states_steps=True)
    model(input_ids=torch.tensor(SEQUENCES))
    with torch.no_grad():
        model.head.weight.add_(0.0)
    model(input_ids=torch.tensor(SEQUENCES))
    opened.stepped()
    model(input_ids=torch.tensor(SEQUENCES))
    state.end_pass()
    calls = Dump(state.settings.pass_folder(0, "update")).calls(0)
    assert [call.weights_version for call in calls.values()] == [0, 0, 1]


def test_only_chosen_steps_and_passes_are_captured(tmp_path):
    settings = AttachSettings(out=str(tmp_path), verl="0.9.1", run_id="r", steps=(1,), passes=("update",))
    state = Session(settings=settings, journal=Journal(settings))
    assert state.begin_pass("update", Toy()) is None
    state.synced(4)
    state.synced(5)
    state.synced(5)  # the same weights again begin no step
    assert state.step == 1
    assert state.begin_pass("old_log_prob", Toy()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_no_dump_in_it_is_none(tmp_path):
    with pytest.raises(DumpError, match="no dump"):
        PartsSide(tmp_path)


def test_an_aborted_request_is_left_out_and_prompts_only_keeps_no_response(state):
    sampled = Sampled(
        request="a", prompt=[1, 2], response=[], logprobs=None, params={}, logprobs_mode="", step=0, replica=0
    )
    record_request(state, sampled)
    assert not state.settings.rollout_folder(0).exists()
    assert sessions.session() is state
