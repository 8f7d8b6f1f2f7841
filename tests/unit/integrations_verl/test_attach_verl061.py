"""verl 0.6.1's hooks on functions shaped like verl's own: rows, log-probs, passes, weights on their way."""

import json

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainfer.check.compare.source import DumpSide
from trainfer.check.dump.records import RowLayout
from trainfer.integrations.verl import session as session_module
from trainfer.integrations.verl import v061_rollout, v061_train
from trainfer.integrations.verl.points import table_for
from trainfer.integrations.verl.settings import VARIABLE, AttachSettings
from trainfer.integrations.verl.v061_batch import prompts_of, read_micro_batch, response_logprobs
from trainfer.integrations.verl.v061_prompts import optimizer_step
from trainfer.integrations.verl.wrapping import wrap

PAD = 0
PROMPTS = [[5, 6, 7], [8, 9]]
RESPONSES = [[10, 11], [12, 13, 14]]


def padded_batch() -> dict[str, torch.Tensor]:
    """As verl lays it out: prompts [2, 4] padded on the left, responses [2, 3] on the right."""
    prompts = torch.tensor([[PAD, 5, 6, 7], [PAD, PAD, 8, 9]])
    responses = torch.tensor([[10, 11, PAD], [12, 13, 14]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]])
    return {
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }


def test_a_micro_batch_loses_its_padding():
    batch = read_micro_batch(padded_batch())
    assert batch.sequences == [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert batch.prompt_lengths == [3, 2]
    values = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -4.0, -5.0]])
    assert response_logprobs(batch, values) == [[-1.0, -2.0], [-3.0, -4.0, -5.0]]


def test_prompts_alone_score_their_last_token():
    trimmed = prompts_of(padded_batch())
    assert trimmed["input_ids"].tolist() == [[PAD, 5, 6, 7], [PAD, PAD, 8, 9]]
    assert trimmed["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert trimmed["responses"].tolist() == [[7], [9]]


class Actor:
    """``DataParallelPPOActor`` of verl 0.6.1 as far as its hooks see it, with its arithmetic."""

    def __init__(self, *, packed: bool = False, is_reference: bool = False) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
        )
        self.actor_module: nn.Module = Qwen3ForCausalLM(config)
        self.actor_optimizer = None if is_reference else object()
        self.use_remove_padding = packed
        self.use_ulysses_sp = False
        self.steps = 0

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        width = micro_batch["responses"].shape[-1]
        ids, mask = micro_batch["input_ids"], micro_batch["attention_mask"]
        if self.use_remove_padding:
            kept = mask.bool()
            logits = ids.new_zeros((*ids.shape, 16), dtype=torch.float32)
            packed = self.actor_module(
                input_ids=ids[kept][None],
                position_ids=micro_batch["position_ids"][kept][None],
                use_cache=False,
            ).logits
            logits[kept] = packed[0].detach()
        else:
            logits = self.actor_module(
                input_ids=ids, attention_mask=mask, position_ids=micro_batch["position_ids"], use_cache=False
            ).logits
        scores = (logits / temperature)[:, -width - 1 : -1].log_softmax(-1)
        return None, scores.gather(-1, micro_batch["responses"][..., None])[..., 0]

    def compute_log_prob(self, data, calculate_entropy=False):
        return self._forward_micro_batch(data, temperature=0.5)

    def update_policy(self, data):
        _, log_probs = self._forward_micro_batch(data, temperature=0.5)
        if log_probs.requires_grad:
            log_probs.sum().backward()
        self._optimizer_step()
        return log_probs

    def _optimizer_step(self):
        self.steps += 1
        return torch.ones(())


@pytest.fixture
def attached(tmp_path, monkeypatch):
    """Attach this process to nothing in particular; gives a function that sets the options and hooks ``Actor``."""

    def attach(**options: object):
        settings = AttachSettings(out=str(tmp_path / "out"), verl="0.6.1", run_id="r", steps=(0,), **options)
        monkeypatch.setenv(VARIABLE, settings.encode())
        session_module.session.cache_clear()
        v061_rollout._sent_dump.cache_clear()
        v061_train._Actor.updates = 0
        session = session_module.session()
        session.synced(0)
        advised = {
            "compute_log_prob": v061_train.log_prob,
            "update_policy": v061_train.update,
            "_forward_micro_batch": v061_train.micro_batch,
            "_optimizer_step": optimizer_step,
        }
        for name, advice in advised.items():
            monkeypatch.setattr(Actor, name, wrap(vars(Actor)[name], advice, _raise))
        return session

    yield attach
    session_module.session.cache_clear()
    v061_rollout._sent_dump.cache_clear()


def _raise(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("packed", [False, True])
def test_passes_are_captured_with_rows_and_log_probs(attached, tmp_path, packed: bool):
    attached()
    actor = Actor(packed=packed)
    _, values = actor.compute_log_prob(padded_batch())
    side = DumpSide(tmp_path / "out/step_0/old_log_prob")
    (call,) = side.calls(0).values()
    assert call.layout is (RowLayout.GIVEN if packed else RowLayout.PADDED)
    rows = side.rows(0, side.row_tables(0)[call.table])
    real = rows[rows["position"] >= 0]
    assert real["token"].tolist() == [*PROMPTS[0], *RESPONSES[0], *PROMPTS[1], *RESPONSES[1]]
    assert real["position"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    recorded = list(side.sequences(0))
    assert [list(r.tokens) for r in recorded] == [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert recorded[0].sampling["temperature"] == 0.5
    assert recorded[0].logprobs == pytest.approx(values[0, :2].tolist())
    assert recorded[1].logprobs == pytest.approx(values[1].tolist())


def test_reference_and_update_have_names_of_their_own(attached, tmp_path):
    attached()
    Actor(is_reference=True).compute_log_prob(padded_batch())
    actor = Actor()
    actor.update_policy(padded_batch())
    assert v061_train.updates_done() == 1
    assert actor.steps == 1
    assert sorted(path.name for path in (tmp_path / "out/step_0").iterdir()) == ["ref_log_prob", "update"]


def test_steps_that_nobody_asked_for_are_left_alone(attached, tmp_path):
    session = attached()
    session.synced(1)
    Actor().compute_log_prob(padded_batch())
    assert not (tmp_path / "out/step_1").exists()


def test_prompts_only_learns_nothing(attached, tmp_path):
    attached(prompts_only=True, passes=("update",))
    actor = Actor()
    log_probs = actor.update_policy(padded_batch())
    assert log_probs.shape == (2, 3)
    assert actor.steps == 0
    side = DumpSide(tmp_path / "out/update_actor/step_0")
    (call,) = side.calls(0).values()
    rows = side.rows(0, side.row_tables(0)[call.table])
    assert rows[rows["position"] >= 0]["token"].tolist() == [*PROMPTS[0], *PROMPTS[1]]
    notes = (tmp_path / "out/processes").glob("*.jsonl")
    assert any(
        "SKIPPED" in json.loads(line)["text"] for path in notes for line in path.read_text().splitlines()
    )


class Rollout:
    """``vLLMRollout`` as far as its hook sees it."""

    class config:
        dtype = "bfloat16"

    async def update_weights(self, weights, **kwargs):
        return dict(weights)


def test_weights_are_fingerprinted_as_they_are_sent(attached, tmp_path, monkeypatch):
    import asyncio

    attached()
    monkeypatch.setattr(v061_rollout.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        Rollout, "update_weights", wrap(Rollout.update_weights, v061_rollout.weights_sent, _raise)
    )
    value = torch.randn(3, 4)
    for updates in (0, 0, 1):  # the second is a validation's: the same weights
        v061_train._Actor.updates = updates
        arrived = asyncio.run(
            Rollout().update_weights(iter([("model.norm.weight", value + updates)]), peft_config=None)
        )
        assert torch.equal(arrived["model.norm.weight"], value + updates)
    records = list(DumpSide(tmp_path / "out/weights/train").weights(0))
    assert [record.weights_version for record in records] == [0, 0, 1]
    assert records[0].fingerprint == records[1].fingerprint != records[2].fingerprint
    assert records[0].dtype == "BF16"


def test_the_table_names_functions_of_the_published_version():
    table = table_for("0.6.1")
    assert table is not None
    assert not table.has_plugins
    names = {point.name for point in table.points}
    assert {"DataParallelPPOActor.update_policy", "ActorRolloutRefWorker.rollout_mode"} <= names
