import json
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from trainfer.config import document
from trainfer.config.keys import REQUIRED, default_values, known_keys, sections
from trainfer.config.problems import find_entry
from trainfer.config.schema import TrainConfig
from trainfer.config.unsupported_table import UNSUPPORTED
from trainfer.errors import ConfigError


def verl_defaults(version):
    return json.loads(files("trainfer.config").joinpath(f"verl_defaults_{version}.json").read_text())["fsdp"]


def _listed(value):
    return list(value) if isinstance(value, tuple) else value


def test_every_key_says_what_it_counts():
    for key in known_keys().values():
        if key.section is None:
            assert key.description.endswith((".", "]")), key.name
            assert len(key.description) > 15, key.name
            assert key.rule, key.name


def test_every_default_is_a_legal_value():
    for key in known_keys().values():
        if key.default is not REQUIRED:
            msgspec.convert(msgspec.to_builtins(key.default), key.type)


def test_sections_and_keys_are_disjoint_but_for_optional_sections():
    assert {name for name in sections() if name in known_keys()} == {"trainfer.warmup"}
    assert not any(name.startswith("trainfer.warmup.") for name in default_values())


@pytest.mark.parametrize("version", ["0.6.1", "0.9.1"])
def test_every_key_of_verl_is_honoured_or_explained(version):
    unexplained = [
        name for name in verl_defaults(version)
        if name not in known_keys() and name not in sections() and find_entry(name) is None
    ]  # fmt: skip
    assert unexplained == []


def test_our_defaults_are_those_of_verl_except_where_the_description_says_so():
    theirs = verl_defaults("0.9.1")
    differing = {
        name
        for name, value in default_values().items()
        if name in theirs and _listed(value) != theirs[name] and not str(theirs[name]).startswith("${")
    }
    # required there, no default path here, and console alone because nothing else need be installed
    expected = {"data.val_files", "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.name"}
    expected |= {
        "trainer.logger",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.default_local_dir",
    }
    said = {name for name in differing if "verl" in known_keys()[name].description}
    assert differing - said - expected <= {"actor_rollout_ref.actor.fsdp_config.model_dtype"}


def test_each_entry_of_the_table_is_reachable_and_a_sentence():
    names = [entry.pattern for entry in UNSUPPORTED if not entry.refused]
    assert len(names) == len(set(names))
    for entry in UNSUPPORTED:
        assert entry.sentence.endswith((".", "start", ")", "prompts", "path")), entry
        if entry.refused:
            assert entry.pattern in known_keys(), entry.pattern


def test_the_page_of_keys_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == document.markdown(), (
        "run `python -m trainfer.config.document docs/configuration.md`"
    )


def test_one_key_or_one_section_can_be_explained():
    assert "at least 1; default 1024" in document.help_key("data.train_batch_size")
    assert "trainfer.warmup.steps" in document.help_key("trainfer.warmup")
    with pytest.raises(ConfigError, match=r"Did you mean data\.train_batch_size"):
        document.help_key("data.train_batch")
    with pytest.raises(ConfigError, match="no critic"):
        document.help_key("critic.optim.lr")


def test_the_help_names_every_key():
    text = document.help_text()
    assert all(
        f"  {name.rsplit('.', 1)[-1]} (" in text for name, key in known_keys().items() if key.section is None
    )


def test_a_built_configuration_converts_to_itself():
    config = msgspec.convert({"data": {"train_files": "a"}, "trainfer": {"warmup": {}}}, TrainConfig)
    assert msgspec.convert(msgspec.to_builtins(config), TrainConfig) == config
