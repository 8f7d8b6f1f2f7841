import pytest
from worker_cases import planned

from trainfer.errors import ConfigError
from trainfer.workers.checks import check_honoured

CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"


def test_a_plain_configuration_passes():
    check_honoured(*planned())
    check_honoured(*planned("trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.n_gpus_per_node=2", f"{ROLLOUT}.name=scripted"), "in the order of its file"),
        (("trainer.val_only=true",), "needs data.val_files"),
        (
            ("trainer.val_only=true", "data.val_files=v.parquet", "trainer.val_before_train=false"),
            "verl would train",
        ),
        ((f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"), "would be 1"),
        ((f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='3_2'"), "ascending pair"),
        ((f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.top_p=0.9"), "filtered"),
        ((f"{ROLLOUT}.name=scripted",), "scripted_responses"),
        (("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"), "choose one"),
    ],
)
def test_what_workers_cannot_do_is_refused_with_the_remedy(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_honoured(*planned(*overrides))


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_honoured(
            *planned("trainer.val_only=true", f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.top_p=0.9")
        )
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{CORRECTION}.rollout_rs=token_k1", "rejecting tokens or sequences is not implemented"),
        (f"{CORRECTION}.rollout_rs_threshold=2", "rejecting tokens or sequences is not implemented"),
        (f"{CORRECTION}.loss_type=reinforce", "use ppo_clip"),
    ],
)
def test_no_key_is_described_as_working_and_then_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        planned(override)


def test_values_that_ask_for_nothing_may_stand():
    check_honoured(*planned(f"{CORRECTION}.rollout_rs=null", "algorithm.kl_ctrl.type=adaptive"))
    check_honoured(*planned("trainer.val_only=true", "data.val_files=v.parquet"))
