import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainfer.cli.export import command, export_checkpoint, find_checkpoint
from trainfer.errors import CheckpointError
from trainfer.integrations.transformers.load import save_model
from trainfer.integrations.transformers.tiny import byte_tokenizer, tiny_model
from trainfer.train.journal.checkpoints import CheckpointStore
from trainfer.train.update import checkpoint_export
from trainfer.train.update.checkpoint import save_training_state
from trainfer.train.update.checkpoint_export import copy_model_files


def trained(architecture, *, tied=False, dtype=torch.float32):
    model = tiny_model(architecture, hidden_size=32, intermediate_size=64, dtype=dtype)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.sin(torch.arange(parameter.numel(), dtype=dtype)).reshape(parameter.shape)
    optimizer.step()
    return model, optimizer


def run_with(tmp_path, architecture="qwen3", steps=(1,), **options):
    model, optimizer = trained(architecture, **options)
    base = tmp_path / "base"
    save_model(model, base, tokenizer=byte_tokenizer())
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=None)

    def write(folder):
        save_training_state(folder / "actor", model, optimizer, {"weights_version": 1})
        copy_model_files(base, folder)

    for step in steps:
        store.save(step, write, required=True)
    return model, tmp_path / "run"


def assert_loads_to_the_same_bits(model, out):
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = model.state_dict()
    found = loaded.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    return loaded


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True), ("llama", False), ("gpt2", True)],
)
def test_the_folder_loads_to_the_trained_bits(tmp_path, architecture, tied):
    model, run = run_with(tmp_path, architecture, tied=tied)
    export_checkpoint(find_checkpoint(run), tmp_path / "out", dtype=None, overwrite=False)
    loaded = assert_loads_to_the_same_bits(model, tmp_path / "out")
    same = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert same == tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("2 + 2?")["input_ids"] == byte_tokenizer()("2 + 2?")["input_ids"]
    assert (tmp_path / "out" / "generation_config.json").is_file()
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118 - not a mapping


def test_bfloat16_stays_bfloat16_and_a_cast_is_the_ordinary_one(tmp_path):
    model, run = run_with(tmp_path, dtype=torch.bfloat16)
    export_checkpoint(find_checkpoint(run), tmp_path / "out", dtype=None, overwrite=False)
    assert_loads_to_the_same_bits(model, tmp_path / "out")
    export_checkpoint(find_checkpoint(run), tmp_path / "wide", dtype="float32", overwrite=False)
    assert_loads_to_the_same_bits(model.float(), tmp_path / "wide")


def test_a_large_model_is_split_and_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_export, "MAX_EXPORT_FILE_BYTES", 40_000)
    model, run = run_with(tmp_path)
    export_checkpoint(find_checkpoint(run), tmp_path / "out", dtype=None, overwrite=False)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) >= 3
    assert_loads_to_the_same_bits(model, tmp_path / "out")
    monkeypatch.undo()
    export_checkpoint(find_checkpoint(run), tmp_path / "out", dtype=None, overwrite=True)
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    assert_loads_to_the_same_bits(model, tmp_path / "out")


def test_a_run_means_its_newest_whole_checkpoint_and_a_name_means_that_one(tmp_path, caplog):
    _, run = run_with(tmp_path, steps=(1, 2, 3))
    (run / "checkpoints" / "global_step_3" / "actor" / "training_state.json").write_text("{}")
    assert find_checkpoint(run).name == "global_step_2"
    assert find_checkpoint(run / "checkpoints").name == "global_step_2"
    assert find_checkpoint(run / "checkpoints" / "global_step_1").name == "global_step_1"
    with pytest.raises(CheckpointError, match=r"training_state\.json has 2 bytes.*global_step_2"):
        find_checkpoint(run / "checkpoints" / "global_step_3")


def test_an_existing_folder_is_not_touched_without_overwrite(tmp_path):
    _, run = run_with(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(find_checkpoint(run), out, dtype=None, overwrite=False)  # empty: fine
    (out / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match="--overwrite"):
        export_checkpoint(find_checkpoint(run), out, dtype=None, overwrite=False)
    export_checkpoint(find_checkpoint(run), out, dtype=None, overwrite=True)
    assert (out / "README.md").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="existing file"):
        export_checkpoint(find_checkpoint(run), tmp_path / "file", dtype=None, overwrite=True)
    assert not list(tmp_path.glob(".out-*")), "nothing half-written is left"


@pytest.mark.parametrize("what", ["none", "empty"])
def test_no_checkpoint_is_an_error_in_words(tmp_path, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"is not a folder|no whole checkpoint"):
        find_checkpoint(tmp_path / what)


def test_a_model_folder_without_config_is_refused_when_saving(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        copy_model_files(tmp_path, tmp_path / "checkpoint")


def test_the_command_says_what_it_wrote_and_how_to_load_it(tmp_path):
    _, run = run_with(tmp_path)
    result = CliRunner().invoke(command, [str(run), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "global_step_1" in result.output
    assert "from_pretrained" in result.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
