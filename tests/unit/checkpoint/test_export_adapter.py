"""A checkpoint of an adapter as a merged model and as PEFT's own folder."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trainfer.cli.export import command
from trainfer.errors import CheckpointError
from trainfer.integrations.peft.adapter import AdapterSettings, add_adapter
from trainfer.integrations.transformers.load import byte_tokenizer, load_model, save_model, tiny_model
from trainfer.train.journal.checkpoints import CheckpointStore
from trainfer.train.update.checkpoint import read_state, save_training_state
from trainfer.train.update.checkpoint_adapter import StoredAdapter
from trainfer.train.update.checkpoint_export import copy_model_files, write_model_folder
from trainfer.workers.weights import base_fingerprints

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def run(tmp_path):
    """(adapted model, base folder, checkpoint)."""
    base = tmp_path / "base"
    save_model(
        tiny_model("qwen3", hidden_size=32, intermediate_size=64, dtype=torch.float32),
        base,
        tokenizer=byte_tokenizer(),
    )
    model = load_model(base, dtype=torch.float32, device="cpu", attention="sdpa")
    settings = AdapterSettings(
        rank=4, alpha=8, target_modules="all-linear", exclude_modules=("k_proj",), folder=None, seed=1
    )
    layout = add_adapter(model, settings, base_folder=base)
    assert not any("k_proj" in layer for layer in layout.scalings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=None)

    def write(folder):
        adapter = StoredAdapter.of(layout, base_fingerprints(model, layout))
        save_training_state(folder / "actor", model, None, {"updates": 1}, adapter=adapter)
        copy_model_files(base, folder)

    return model, base, store.save(1, write, required=True)


def export(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_the_merged_folder_computes_as_the_adapted_model(run, tmp_path):
    model, base, checkpoint = run
    result = export(checkpoint, tmp_path / "out")
    assert result.exit_code == 0, result.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, model(IDS).logits, atol=1e-5)
    exported, before = load_file(tmp_path / "out/model.safetensors"), load_file(base / "model.safetensors")
    assert exported.keys() == before.keys()
    changed = {name for name in exported if not torch.equal(exported[name], before[name])}
    assert changed == {name for name in exported if name.endswith("_proj.weight") and "k_proj" not in name}
    layer = model.model.layers[1].mlp.down_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(exported["model.layers.1.mlp.down_proj.weight"], expected)


def test_peft_loads_the_adapter_folder_to_the_same_logits(run, tmp_path):
    from peft import PeftModel

    model, base, checkpoint = run
    result = export(checkpoint, tmp_path / "adapter", "--adapter")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 4
    loaded = PeftModel.from_pretrained(
        load_model(base, dtype=torch.float32, device="cpu", attention="sdpa"), tmp_path / "adapter"
    )
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_base_that_has_moved_is_asked_for_and_one_that_has_changed_is_refused(run, tmp_path):
    _, base, checkpoint = run
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"--base FOLDER"):
        write_model_folder(checkpoint, tmp_path, dtype=None)
    out = tmp_path / "out"
    out.mkdir()
    assert write_model_folder(checkpoint, out, dtype=torch.bfloat16, base=moved) > 0
    tensors = load_file(moved / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 of \d+ differ .*layers\.0\.mlp\.up_proj\.weight"):
        write_model_folder(checkpoint, tmp_path / "again", dtype=None, base=moved)


def test_damaged_adapter_entries_are_refused(run):
    _, _, checkpoint = run
    path = checkpoint / "actor/training_state.json"
    state = json.loads(path.read_text())
    for damage in ({"scalings": []}, {"base": {"a": 1}}, {"config": None}, {"base_folder": 3}):
        path.write_text(json.dumps(state | {"adapter": state["adapter"] | damage}))
        with pytest.raises(CheckpointError, match="entry `adapter`"):
            read_state(checkpoint / "actor")
