import json

import pytest

from trainfer.cli.main import main
from trainfer.cli.model_source import ModelSource, find_model
from trainfer.errors import CheckpointError, ModelError
from trainfer.integrations.transformers.load import byte_tokenizer, save_model, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny_model("qwen3", max_positions=64), folder, tokenizer=byte_tokenizer())
    return folder


def generate(capfd, *words):
    code = main(["generate", *map(str, words)])
    out, err = capfd.readouterr()
    return code, out, err


def responses(capfd, *words):
    code, out, err = generate(capfd, *words, "--json")
    assert code == 0, err
    return json.loads(out)["responses"]


def test_a_response_depends_on_prompt_number_and_seed_alone(model, capfd):
    words = (model, "--max-new-tokens", 6)
    alone = responses(capfd, *words, "-p", "one", "-n", 2)
    among = responses(capfd, *words, "-p", "one", "-p", "two and more", "-n", 2)
    assert [r["token_ids"] for r in among[:2]] == [r["token_ids"] for r in alone]
    assert alone[0]["token_ids"] != alone[1]["token_ids"]
    other = responses(capfd, *words, "-p", "one", "-n", 2, "--seed", 1)
    assert other[0]["token_ids"] != alone[0]["token_ids"]


def test_both_engines_decode_greedily_alike(model, capfd):
    words = (model, "-p", "abc", "--temperature", 0, "--max-new-tokens", 8)
    one, other = (responses(capfd, *words, "--engine", engine)[0] for engine in ("builtin", "hf"))
    assert one["token_ids"] == other["token_ids"]
    assert len(one["logprobs"]) == len(one["token_ids"])


def test_raw_text_and_a_system_message_change_the_prompt(model, capfd):
    words = (model, "-p", "abc", "--temperature", 0, "--max-new-tokens", 4)
    chat, raw = responses(capfd, *words)[0], responses(capfd, *words, "--raw")[0]
    system = responses(capfd, *words, "--system", "be brief")[0]
    assert len({tuple(r["logprobs"]) for r in (chat, raw, system)}) == 3


def test_without_a_length_responses_fit_the_model(model, capfd):
    found = responses(capfd, model, "-p", "abc", "--temperature", 0)[0]
    prompt_tokens = len(byte_tokenizer()("abc")["input_ids"]) + 3  # user, end, assistant
    assert len(found["token_ids"]) <= 64 - prompt_tokens
    assert found["finish_reason"] == "stop" or len(found["token_ids"]) == 64 - prompt_tokens


def test_plain_output_is_the_text(model, capfd):
    code, out, err = generate(capfd, model, "-p", "abc", "--temperature", 0, "--max-new-tokens", 4)
    text = responses(capfd, model, "-p", "abc", "--temperature", 0, "--max-new-tokens", 4)[0]["text"]
    assert (code, out) == (0, text + "\n")
    assert "cut off" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nix", "-p", "a"], "no such file or folder"),
        ([".", "-p", "a"], "no whole checkpoint"),
        (["{model}"], "Missing option '-p'"),
        (["{model}", "-p", "a", "--top-k", "0"], "leaves no token"),
        (["{model}", "-p", "a", "--temperature", "-1"], "x>=0"),
        (["{model}", "-p", "a", "--raw", "--system", "b"], "give one of them"),
        (["{model}", "-p", "a" * 80], "the model knows 64 positions"),
        (["{model}", "-p", "", "--raw"], "has no token"),
        (["{model}", "-p", "a", "--device", "cuda"], "finds no GPU"),
    ],
)
def test_wrong_input_is_one_message(model, tmp_path, monkeypatch, capfd, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = generate(capfd, *(word.format(model=model) for word in words))
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_configuration_means_its_newest_checkpoint_or_its_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{train_files: t}}\nactor_rollout_ref: {{model: {{path: {model}}}}}\n")
    assert find_model(config) == ModelSource(model_folder=model)
    (tmp_path / "runs/trainfer/grpo/checkpoints/global_step_3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        find_model(config)
    with pytest.raises(ModelError, match="Train first"):
        find_model(
            config, ["trainfer.warmup={}", "~actor_rollout_ref.model", "trainer.experiment_name=other"]
        )
