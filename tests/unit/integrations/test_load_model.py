import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainfer.errors import ModelError
from trainfer.exact.fingerprint import fingerprint
from trainfer.exact.packed import forward_logits, pack
from trainfer.integrations.transformers.load import (
    byte_tokenizer,
    load_model,
    load_tokenizer,
    save_model,
    tiny_model,
)
from trainfer.integrations.transformers.tiny import ARCHITECTURES, BYTE_VOCABULARY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tiny_model("qwen3"), tmp_path / "model", tokenizer=byte_tokenizer())
    return tmp_path / "model"


def load(path: Path | str) -> torch.nn.Module:
    return load_model(path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_comes_back_bit_for_bit_and_runs(architecture, tmp_path):
    model = tiny_model(architecture)
    save_model(model, tmp_path, tokenizer=byte_tokenizer())
    loaded = load(tmp_path)
    assert not loaded.training
    assert {n: fingerprint(t) for n, t in loaded.state_dict().items()} == {
        n: fingerprint(t) for n, t in model.state_dict().items()
    }
    batch = pack([[5, 6, 7]], [1], device="cpu")
    assert torch.equal(forward_logits(loaded, batch), forward_logits(model, batch))  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_auto_classes_load_the_folder_without_trainfer(architecture, tmp_path):
    save_model(tiny_model(architecture), tmp_path, tokenizer=byte_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "trainfer" not in (tmp_path / "config.json").read_text()
    text = "2 + 2 = é\n\t'quoted' 日本 "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == BYTE_VOCABULARY == model.config.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_chat_template_marks_roles_and_turns(folder):
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>hi<|end|><|assistant|>ho<|end|><|assistant|>"
    ids = tokenizer.encode(str(text))
    assert len(ids) == 9  # every role and end is one token, every byte another


def test_a_seed_makes_the_same_model_and_leaves_the_random_state():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, two, other = tiny_model("llama", seed=1), tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    assert torch.equal(torch.rand(1), expected)
    first, second, third = (fingerprint(m.get_input_embeddings().weight) for m in (one, two, other))
    assert first == second != third


def test_dtype_is_honoured(folder):
    model = load_model(folder, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_unknown_tiny_architecture_names_the_known():
    with pytest.raises(ModelError, match=r"'bert'.*qwen2, qwen3, llama, gpt2"):
        tiny_model("bert")


def test_a_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="no such model folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no such model folder"):
        load_tokenizer("Qwen/Qwen3-0.6B")


def test_a_file_instead_of_a_folder(folder):
    with pytest.raises(ModelError, match="is a file"):
        load(folder / "config.json")


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}', "\x00\xff"])
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_model"}, "'no_such_model' is no causal language model"),
        ({"model_type": "vit"}, "'vit' is no causal language model"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "never run"),
        ({"num_hidden_layers": "four"}, "refuses it"),
        ({"num_hidden_layers": 3}, r"lack model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"no place in the model, model\.layers\.1"),
        ({"intermediate_size": 100}, "another shape for|cannot build"),
    ],
)
def test_a_config_of_another_model(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_truncated_and_corrupt_safetensors(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4], b"", b"\xff" * 8 + whole[8:]):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors: is damaged"):
            load(folder)


def test_missing_weights_and_missing_shards(folder):
    file = folder / "model.safetensors"
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001-of-00001\.safetensors: is named"):
        load(folder)
    index["weight_map"]["lm_head.weight"] = "../../etc/passwd"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        load(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        load(folder)


def test_pickled_weights_are_refused_and_never_opened(folder, tmp_path):
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (marker,)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\).*save_pretrained"):
        load(folder)
    assert not marker.exists()


def test_a_folder_without_tokenizer_or_with_a_broken_one(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        load_tokenizer(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_without_an_end_is_refused(folder):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("eos_token")
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no eos_token"):
        load_tokenizer(folder)
