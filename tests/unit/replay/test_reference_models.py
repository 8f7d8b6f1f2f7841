"""The model of a replay: a module, a folder, or built again from a dump that holds its weights."""

import copy
import json
from pathlib import Path

import pytest
import torch
from replay_pairs import make_pair, tiny_model

import trainfer
from trainfer.check.compare.source import DumpSide
from trainfer.errors import ModelError
from trainfer.integrations.transformers.rebuild import rebuild


def test_a_folder_gives_the_same_replay_as_the_module(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    pair = make_pair(tmp_path, model)
    model.save_pretrained(tmp_path / "model")
    first = trainfer.compare(pair.rollout, pair.train, model=model).replay
    second = trainfer.compare(pair.rollout, pair.train, model=tmp_path / "model").replay
    assert first is not None
    assert second is not None
    assert [m.module for m in first.modules] == [m.module for m in second.modules]
    assert second.not_replayed == {}


def test_a_folder_with_pickles_alone_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    pair = make_pair(tmp_path, model)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights"):
        trainfer.compare(pair.rollout, pair.train, model=tmp_path / "model")


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma2", "mixtral"])
def test_a_dump_with_all_weights_gives_its_model(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16)
    pair = make_pair(tmp_path, model, weights="full")
    found = rebuild(DumpSide(pair.train))
    assert found is not None
    wanted = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        ours, theirs = (copy.deepcopy(one).float() for one in (found, model))
        for (
            name,
            buffer,
        ) in ours.named_buffers():  # .to(bfloat16) rounded the model's, the built ones are not rounded
            buffer.copy_(theirs.get_buffer(name))
        ours, theirs = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    result = trainfer.compare(pair.rollout, pair.train)
    assert result.replay is not None
    assert len(result.replay.modules) > 20


def test_without_weights_and_without_a_model_there_is_no_replay(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, tiny_model("llama"))
    assert rebuild(DumpSide(pair.train)) is None
    assert trainfer.compare(pair.rollout, pair.train).replay is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**6},
        {"model_type": "not_there"},
        {"model_type": 7},
        {"intermediate_size": "many"},
        {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"},
    ],
)
def test_a_hostile_configuration_builds_nothing(change: dict[str, object], tmp_path: Path) -> None:
    pair = make_pair(tmp_path, tiny_model("llama"), weights="full")
    for manifest in pair.train.rglob("manifest*.json"):
        content = json.loads(manifest.read_text())
        content["model_config"] |= change
        manifest.write_text(json.dumps(content))
    assert rebuild(DumpSide(pair.train)) is None
