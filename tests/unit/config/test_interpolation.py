import pytest

from trainfer.config.load import load_config
from trainfer.errors import ConfigError

BASE = ("data.train_files=t", "actor_rollout_ref.model.path=m")


def load(*overrides):
    return load_config(None, [*BASE, *overrides]).config


def test_another_key_may_be_named_set_or_not():
    config = load("data.max_prompt_length=100", "data.max_response_length=${data.max_prompt_length}")
    assert config.data.max_response_length == 100
    assert load("data.max_response_length=${data.max_prompt_length}").data.max_response_length == 512


def test_references_may_chain_and_sit_in_lists():
    config = load("data.prompt_key=${trainer.project_name}", "trainer.project_name=p${trainer.experiment_name}",
                  "data.train_files=['${data.prompt_key}/a','b']")  # fmt: skip
    assert config.data.train_files == ("pgrpo/a", "b")


def test_the_folder_of_the_file_can_be_named(write):
    path = write("data: {train_files: '${config_dir:}/t'}\nactor_rollout_ref: {model: {path: m}}\n")
    loaded = load_config(path, [])
    assert loaded.config.data.train_files == f"{path.parent}/t"
    assert loaded.settings["data.train_files"].source == f"{path}:1"


def test_environment_variables_are_read(monkeypatch):
    monkeypatch.setenv("WHERE", "/data")
    monkeypatch.delenv("NOWHERE", raising=False)
    config = load("data.prompt_key='${oc.env:WHERE}/x'", "data.reward_fn_key='${oc.env:NOWHERE,d}'")
    assert (config.data.prompt_key, config.data.reward_fn_key) == ("/data/x", "d")
    monkeypatch.setenv("COUNT", "7")
    assert load("data.max_prompt_length='${oc.decode:${oc.env:COUNT}}'").data.max_prompt_length == 7


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.prompt_key=${data.nothing}"], "data.nothing"),
        (["data.prompt_key=${oc.env:NOWHERE}"], "NOWHERE"),
        (["data.prompt_key=${oc.select:data.seed}"], "the resolver 'oc.select' is not used here"),
        (["data.prompt_key=${hydra:x}"], "the resolver 'hydra' is not used here"),
        (["data.prompt_key=${data.reward_fn_key}", "data.reward_fn_key=${data.prompt_key}"], "in a circle"),
        (["data.prompt_key=${data.prompt_key}"], "Recursive interpolation"),
        (["data.prompt_key='${data.seed'"], "override"),
        (["data.prompt_key='" + "${data.seed}" * 33 + "'"], "more than 32 interpolations"),
    ],
)
def test_what_cannot_be_resolved_names_key_and_source(monkeypatch, overrides, said):
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert said in str(caught.value)
    assert "override" in str(caught.value)


def test_values_cannot_be_blown_up(write):
    names = [f"k{i}" for i in range(40)]
    text = (
        "a: {k0: xxxxxxxxxx, "
        + ", ".join(f"k{i}: '" + ("${a.k" + str(i - 1) + "}") * 10 + "'" for i in range(1, 40))
        + "}\n"
    )
    assert len(names) == 40
    with pytest.raises(ConfigError, match="64 KiB"):
        load_config(write(text), [])


def test_an_environment_variable_cannot_smuggle_an_interpolation(monkeypatch):
    monkeypatch.setenv("EVIL", "${oc.env:HOME}")
    with pytest.raises(ConfigError, match="resolves to another"):
        load("data.prompt_key=${oc.env:EVIL}")
