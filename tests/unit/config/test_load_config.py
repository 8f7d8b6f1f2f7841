from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainfer.config.load import effective_yaml, load_config
from trainfer.config.settings import Setting
from trainfer.errors import ConfigError

MINIMAL = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m")


def message(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_minimal_file_gives_verl_defaults(minimal):
    config = load_config(minimal, []).config
    assert config.data.train_batch_size == 1024
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.999)
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0


def test_a_configuration_can_be_overrides_alone():
    assert load_config(None, MINIMAL).config.data.train_files == "t.parquet"


def test_every_value_names_its_source(write):
    path = write("data:\n  train_files: t\n  seed: 3\nactor_rollout_ref:\n  model: {path: m}\n")
    settings = load_config(path, ["trainer.nnodes=1"]).settings
    assert settings["data.seed"] == Setting(value=3, source=f"{path}:3")
    assert settings["actor_rollout_ref.model.path"].source == f"{path}:5"
    assert settings["trainer.nnodes"].source == "override"
    assert settings["trainer.save_freq"] == Setting(value=-1, source="default")


def test_an_override_beats_the_file_and_both_sources_are_kept(write):
    path = write("data:\n  train_files: t\n  train_batch_size: 8\nactor_rollout_ref: {model: {path: m}}\n")
    loaded = load_config(path, ["data.train_batch_size=16", "data.train_batch_size=32"])
    assert loaded.config.data.train_batch_size == 32
    setting = loaded.settings["data.train_batch_size"]
    assert [(s.value, s.source) for s in setting.beaten] == [(16, "override"), (8, f"{path}:3")]
    assert setting.describe() == f"override, beats 16 (override), 8 ({path}:3)"


def test_taking_a_key_back_gives_the_default_and_keeps_what_was_beaten(write):
    path = write("data: {train_files: t, seed: 7}\nactor_rollout_ref: {model: {path: m}}\n")
    setting = load_config(path, ["~data.seed"]).settings["data.seed"]
    assert (setting.value, setting.source, setting.beaten[0].value) == (42, "default", 7)


def test_keys_that_follow_others_are_filled_in():
    config = load_config(None, [*MINIMAL, "trainfer.seed=5", "actor_rollout_ref.actor.clip_ratio=0.3"]).config
    assert config.data.seed == 5
    assert (
        config.actor_rollout_ref.actor.clip_ratio_low,
        config.actor_rollout_ref.actor.clip_ratio_high,
    ) == (0.3, 0.3)
    assert config.actor_rollout_ref.model.tokenizer_path == "m"
    assert config.trainer.default_local_dir == "runs/trainfer/grpo"
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 16384


def test_dynamic_batches_are_on_unless_a_micro_batch_size_is_given():
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    assert load_config(None, MINIMAL).config.actor_rollout_ref.actor.use_dynamic_bsz is True
    assert load_config(None, [*MINIMAL, f"{key}=4"]).config.actor_rollout_ref.actor.use_dynamic_bsz is False


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["trainfer.warmup.num_kv_heads=3"], "num_kv_heads=3 does not divide num_heads=4"),
        (["trainfer.warmup.hidden_size=12"], "hidden_size=12 is no multiple of 2 x num_heads=8"),
    ],
)
def test_a_warm_up_whose_heads_make_no_model_is_refused_with_its_key(overrides, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        load_config(None, ["data.train_files=a.parquet", *overrides])
    assert "trainfer.warmup" in str(caught.value)


def test_both_spellings_of_no_top_k_mean_the_same():
    for section in ("rollout", "rollout.val_kwargs"):
        key = f"actor_rollout_ref.{section}.top_k"
        assert load_config(None, [*MINIMAL, f"{key}=0"]).config == load_config(None, MINIMAL).config


def test_both_spellings_of_a_dtype_mean_the_same():
    both = [
        load_config(None, [*MINIMAL, f"actor_rollout_ref.rollout.dtype={word}"]).config
        for word in ("fp32", "float32")
    ]
    assert both[0] == both[1]


def test_a_scientific_number_without_a_dot_is_a_number(write):
    path = write(
        "data: {train_files: t}\nactor_rollout_ref: {model: {path: m}, actor: {optim: {lr: 1e-4}}}\n"
    )
    assert load_config(path, []).config.actor_rollout_ref.actor.optim.lr == 1e-4


def test_an_unknown_key_names_the_nearest_known_one(minimal):
    assert "Did you mean data.train_batch_size?" in message(minimal, ["data.train_batchsize=4"])
    assert "Did you mean actor_rollout_ref.rollout.temperature?" in message(
        minimal, ["rollout.temperature=1"]
    )
    assert "Did you mean trainer.save_freq?" in message(minimal, ["+trainer.save_frq=1"])
    assert "--help" in message(minimal, ["zzzz.qqqq=1"])


def test_a_verl_key_that_training_does_not_honour_is_refused_with_its_sentence(minimal):
    assert "no critic" in message(minimal, ["critic.optim.lr=1e-5"])
    assert "FSDP2" in message(minimal, ["actor_rollout_ref.actor.strategy=megatron"])
    assert "needs a critic; use grpo" in message(minimal, ["algorithm.adv_estimator=gae"])
    assert "ppo_micro_batch_size_per_gpu" in message(
        minimal, ["actor_rollout_ref.actor.ppo_micro_batch_size=4"]
    )
    assert "SGLang" in message(minimal, ["actor_rollout_ref.rollout.name=sglang"])
    assert "waits for its own rollouts" in message(minimal, ["actor_rollout_ref.rollout.mode=async"])


def test_a_verl_key_that_asks_for_nothing_may_stand(minimal):
    loaded = load_config(
        minimal, ["actor_rollout_ref.actor.strategy=fsdp2", "critic.enable=false", "algorithm.gamma=1.0"]
    )
    assert loaded.settings["actor_rollout_ref.actor.strategy"].source == "override"
    assert "strategy" not in effective_yaml(loaded)


def test_all_problems_are_told_at_once_with_key_value_source_and_rule(write):
    path = write("data:\n  train_batch_size: many\n  shufle: true\nactor_rollout_ref: {model: {path: m}}\n")
    text = message(path, ["trainer.nnodes=0", "critic.lr=1"])
    assert "5 problems" in text
    assert f"data.train_batch_size = 'many' ({path}:2): must be an integer at least 1" in text
    assert f"data.shufle = True ({path}:3): unknown key. Did you mean data.shuffle?" in text
    assert "trainer.nnodes = 0 (override): must be an integer at least 1" in text
    assert "data.train_files: is required and not set" in text


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("data.seed=-1", "an integer at least 0 or null"),
        ("data.shuffle=3", "true or false"),
        ("data.truncation=up", "one of error, left, right, middle"),
        ("actor_rollout_ref.actor.optim.lr=0", "a number above 0"),
        ("actor_rollout_ref.actor.optim.lr=nan", "must be finite"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "a list of 2, each a number at least 0 and below 1"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", "at least 0 and below 1"),
        ("actor_rollout_ref.rollout.temperature=0", "a number above 0"),
        ("actor_rollout_ref.rollout.top_p=1.5", "a number above 0 and at most 1"),
        ("trainer.logger=[console,printer]", "console, file, tensorboard, wandb, trackio"),
        ("data.train_files=[]", "a list, each text"),
        ("data.train_files=3", "text or a list"),
        ("trainer=3", "is a section"),
        ("data.seed.x=3", "no keys below it"),
        ("actor_rollout_ref.model.trust_remote_code=true", "never executed"),
        ("trainfer.warmup=3", "a mapping or null"),
        ("ray_kwargs.ray_init.runtime_env.env_vars.A=3", "a mapping"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_names_the_rule(minimal, override, rule):
    text = message(minimal, [override])
    assert rule in text
    assert "(override)" in text
    assert override.split("=")[0].split(".")[0] in text


def test_a_model_or_a_warm_up_is_required(write):
    path = write("data: {train_files: t}\n")
    assert "trainfer.warmup" in message(path)
    assert load_config(path, ["trainfer.warmup={}"]).config.trainfer.warmup is not None
    assert load_config(path, ["trainfer.warmup.steps=3"]).config.trainfer.warmup.steps == 3
    assert "required" in message(path, ["trainfer.warmup=null"])


def test_open_mappings_take_any_key(minimal):
    loaded = load_config(minimal, ["+data.apply_chat_template_kwargs.enable_thinking=false"])
    assert loaded.config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert loaded.settings["data.apply_chat_template_kwargs.enable_thinking"].source == "override"


def test_an_empty_section_is_no_section(write):
    path = write("data: {train_files: t}\nactor_rollout_ref: {model: {path: m}}\ntrainer:\ntrainfer:\n")
    assert load_config(path, []).config.trainer.nnodes == 1


OVERRIDES = [
    "data.train_files=[a.parquet,'b: c.parquet']",
    "data.apply_chat_template_kwargs={a: {b: [1, null, 'x # y']}}",
    "actor_rollout_ref.actor.optim.lr=1e-7",
    "actor_rollout_ref.model.custom_chat_template='{% for m in messages %}\\n{{ m }}: \"x\"{% endfor %}'",
    "trainer.project_name='no'",
    "trainer.experiment_name='12'",
    "trainfer.exact=true",
    "trainfer.warmup.steps=0",
    "trainfer.consistency.steps=[]",
    "ray_kwargs.ray_init.runtime_env.env_vars={A: '1'}",
    "~trainer.logger",
]


def test_the_effective_yaml_loads_back_to_the_same_configuration(write):
    path = write("data: {train_files: t}\nactor_rollout_ref: {model: {path: m}}\ntrainer: {logger: [file]}\n")
    loaded = load_config(path, OVERRIDES)
    text = effective_yaml(loaded)
    again = load_config(write(text, "effective.yaml"), [])
    assert again.config == loaded.config
    assert effective_yaml(again).count("\n") == text.count("\n")
    assert yaml.safe_load(text)["trainer"]["project_name"] == "no"


def test_the_effective_yaml_names_each_source(minimal):
    text = effective_yaml(load_config(minimal, ["data.train_files=other"]))
    assert f"  train_files: other  # override, beats 'train.parquet' ({minimal}:2)\n" in text
    assert "  shuffle: true  # default\n" in text


def test_a_comment_cannot_break_out_of_its_line(write):
    path = write('data: {train_files: "a\\nb"}\nactor_rollout_ref: {model: {path: m}}\n')
    loaded = load_config(path, ["data.train_files=c"])
    assert load_config(write(effective_yaml(loaded), "e.yaml"), []).config == loaded.config


def test_the_same_file_from_another_folder_keeps_its_relative_name(minimal, monkeypatch):
    monkeypatch.chdir(minimal.parent)
    assert load_config(Path("run.yaml"), []).settings["data.train_files"].source == "run.yaml:2"


@hypothesis_settings(deadline=None, max_examples=40)
@given(
    text=st.text(min_size=1, max_size=12)
    | st.sampled_from(["1e-3", "on", "null", "~", "2024-01-01", "0x1", ".5", "1_0"])
)
def test_any_text_comes_back_from_the_effective_yaml(tmp_path_factory, text):
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    try:
        loaded = load_config(None, [*MINIMAL, f"trainer.project_name={quoted}"])
    except ConfigError:  # not in Hydra's grammar, or an interpolation
        return
    path.write_text(effective_yaml(loaded), encoding="utf-8")
    assert load_config(path, []).config == loaded.config


def test_undecodable_bytes_are_refused_and_do_not_reach_the_file(minimal, tmp_path):
    assert "not UTF-8 text" in message(minimal, ["trainer.project_name='a\udcff'"])
    strange = tmp_path / "a\udcff\n#.yaml"
    strange.write_bytes(minimal.read_bytes())
    effective_yaml(load_config(strange, [])).encode()
