"""What cannot be replayed is named with its reason; nothing is guessed."""

from pathlib import Path

import pytest
import torch
from replay_pairs import beyond, by_name, make_pair, tiny_model
from torch import nn

import trainfer
from trainfer.check.compare.source import DumpSide
from trainfer.check.replay import execute
from trainfer.check.replay.run import replay


def test_statistics_hold_no_rows(tmp_path: Path) -> None:
    model = tiny_model("llama")
    found = make_pair(tmp_path, model, task="statistics").replay(model)
    assert found.modules == ()
    assert "only statistics was captured" in found.not_replayed["model.layers.0.mlp.gate_proj"]


def test_other_weights_are_not_replayed(tmp_path: Path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        other.model.layers[0].mlp.gate_proj.weight[0, 0] += 1e-3
    found = make_pair(tmp_path, model, other).replay(model)
    why = found.not_replayed["model.layers.0.mlp.gate_proj"]
    assert why == "model.layers.0.mlp.gate_proj.weight of the train side is not the model's"
    assert "model.layers.0.mlp.up_proj" in by_name(found)
    assert beyond(found) == []


def test_another_model_is_refused_module_by_module(tmp_path: Path) -> None:
    model = tiny_model("llama")
    found = make_pair(tmp_path, model).replay(tiny_model("llama", seed=5))
    assert "model.layers.1.self_attn.q_proj" in found.not_replayed
    assert "model.layers.1.mlp.act_fn" in by_name(found)


def test_parts_that_were_not_captured_are_run(tmp_path: Path) -> None:
    """With layers alone, a layer's replay runs its attention and MLP itself, whole sequences at a time."""
    model, other = tiny_model("qwen3"), tiny_model("qwen3")
    other.model.layers[1].self_attn.scaling *= 1.05
    found = make_pair(tmp_path, model, other, modules=["model.layers.0", "model.layers.1"]).replay(model)
    assert {module.module for module in found.modules} == {"model.layers.0", "model.layers.1"}
    assert beyond(found) == ["model.layers.1"]


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    """An attention's inputs alone do not tell the turned positions; the model's own are used, and are right."""
    model = tiny_model("qwen3")
    found = make_pair(tmp_path, model, modules=["*.self_attn"]).replay(model)
    assert found.not_replayed == {}
    assert beyond(found) == []


def test_scores_beyond_the_bound_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    pair = make_pair(tmp_path, model)
    monkeypatch.setattr(execute, "MAX_SCORES", 100)
    found = pair.replay(model)
    assert found.not_replayed["model.layers.0.self_attn"].startswith("too large")
    assert "model.layers.0.mlp" in by_name(found)


def test_a_model_that_does_not_run_is_one_sentence(tmp_path: Path) -> None:
    model = tiny_model("llama")
    pair = make_pair(tmp_path, model)
    found = replay(DumpSide(pair.rollout), DumpSide(pair.train), None, nn.Bilinear(2, 2, 2))
    assert found.modules == ()
    assert "could not be run on a few token ids" in found.not_replayed[""]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    make_pair(tmp_path, tiny_model("llama")).replay(model)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == "eager"


def test_a_group_shares_its_prompt_through_a_cache(tmp_path: Path) -> None:
    """A sequence whose prompt another one computed: keys and values come from the rows with the same prefix."""
    model = tiny_model("qwen3")
    prompt = torch.tensor([[5, 9, 3, 8]])
    with trainfer.capture(model, tmp_path / "rollout", side="rollout") as capture, torch.no_grad():
        first = model(input_ids=prompt, use_cache=True)
        cache = first.past_key_values
        more = model(
            input_ids=torch.tensor([[7]]), past_key_values=cache, attention_mask=torch.ones(1, 5).long()
        )
        assert more.logits.shape[1] == 1
        capture.record_logprobs(sequences=[[5, 9, 3, 8, 7]], prompt_lengths=[4], logprobs=[[-1.0]])
    with trainfer.capture(model, tmp_path / "train", side="train") as capture, torch.no_grad():
        model(input_ids=torch.tensor([[5, 9, 3, 8, 7]]))
        capture.record_logprobs(sequences=[[5, 9, 3, 8, 7]], prompt_lengths=[4], logprobs=[[-1.0]])
    found = replay(DumpSide(tmp_path / "rollout"), DumpSide(tmp_path / "train"), None, model)
    assert found.not_replayed == {}
    assert beyond(found) == []
    assert len(by_name(found)["model.layers.0.self_attn"].introduced_rollout) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_a_side_does_not_hand_down_are_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As in vLLM, whose attention turns queries and keys inside: noise floors are measured in the side's own dtype."""
    own = execute.SideExecutor._places_of

    def none_of_tables(self, name: str, argument: str, part: str):
        return iter(()) if argument.startswith("position_embeddings.") else own(self, name, argument, part)

    monkeypatch.setattr(execute.SideExecutor, "_places_of", none_of_tables)
    model = tiny_model("qwen3", dtype=dtype)
    found = make_pair(tmp_path, model).replay(model)
    assert found.not_replayed == {}
    assert beyond(found) == []
