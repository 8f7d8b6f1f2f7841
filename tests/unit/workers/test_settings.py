import pytest
from worker_cases import config, planned

from trainfer.train.update.aggregate import LossAggregation
from trainfer.train.update.kl import KlEstimator
from trainfer.workers.settings import (
    OldLogProbs,
    learning_rate,
    stages,
    trainer_settings,
    training_sampling,
    validation_sampling,
)

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def test_every_constant_of_the_update_comes_from_its_key():
    made, plan = planned(
        f"{ACTOR}.clip_ratio=0.3",
        f"{ACTOR}.clip_ratio_high=0.4",
        f"{ACTOR}.clip_ratio_c=5",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.2",
        f"{ACTOR}.kl_loss_type=mse",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.grad_clip=0.5",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ACTOR}.optim.betas=[0.8,0.95]",
        f"{ACTOR}.optim.weight_decay=0.1",
        f"{ACTOR}.optim.lr=1e-4",
    )
    settings = trainer_settings(made, plan, total_steps=100)
    assert settings.loss.clip_ratio_low == 0.3
    assert settings.loss.clip_ratio_high == 0.4
    assert settings.loss.clip_ratio_c == 5
    assert settings.loss.entropy_coeff == 0.01
    assert settings.loss.kl_loss_coef == 0.2
    assert settings.loss.kl_estimator is KlEstimator.K2
    assert settings.aggregation is LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM
    assert settings.horizon == 8
    assert settings.grad_clip == 0.5
    assert settings.limit.sequences == 2
    assert settings.limit.tokens is None
    assert settings.betas == (0.8, 0.95)
    assert settings.weight_decay == 0.1
    assert settings.learning_rate.peak == 1e-4


@pytest.mark.parametrize(
    ("name", "estimator", "straight"), [("k3", KlEstimator.K3, False), ("low_var_kl+", KlEstimator.K3, True)]
)
def test_a_trailing_plus_takes_the_gradient_of_k2(name, estimator, straight):
    made, plan = planned(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={name}")
    loss = trainer_settings(made, plan, total_steps=1).loss
    assert (loss.kl_estimator, loss.kl_straight_through) == (estimator, straight)


def test_the_kl_weight_counts_only_where_the_loss_has_a_kl_term():
    made, plan = planned(f"{ACTOR}.kl_loss_coef=0.2")
    assert trainer_settings(made, plan, total_steps=1).loss.kl_loss_coef == 0.0


@pytest.mark.parametrize(
    ("overrides", "warmup", "total"),
    [
        ((), 0, 100),
        (("lr_warmup_steps=7",), 7, 100),
        (("lr_warmup_steps_ratio=0.1",), 10, 100),
        (("lr_warmup_steps_ratio=0.1", "total_training_steps=50"), 5, 50),
    ],
)
def test_the_schedule_spans_the_run_unless_told(overrides, warmup, total):
    optim = config(*(f"{ACTOR}.optim.{item}" for item in overrides)).actor_rollout_ref.actor.optim
    rate = learning_rate(optim, total_steps=100)
    assert (rate.warmup_updates, rate.total_updates) == (warmup, total)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), OldLogProbs.UPDATE),
        ((f"{ACTOR}.ppo_mini_batch_size=2",), OldLogProbs.PASS),
        ((f"{ACTOR}.ppo_epochs=2",), OldLogProbs.PASS),
        ((f"{ROLLOUT}.top_p=0.9",), OldLogProbs.PASS),
        ((f"{CORRECTION}.rollout_is=token",), OldLogProbs.PASS),
        (("algorithm.use_kl_in_reward=true",), OldLogProbs.PASS),
        ((f"{CORRECTION}.bypass_mode=true",), OldLogProbs.ROLLOUT),
    ],
)
def test_the_old_policy_is_asked_separately_only_where_something_needs_it(overrides, expected):
    assert stages(*planned(*overrides)).old_logprobs is expected


def test_a_ref_exists_only_for_a_kl_term():
    assert not stages(*planned()).ref
    assert stages(*planned(f"{ACTOR}.use_kl_loss=true")).ref
    assert stages(*planned("algorithm.use_kl_in_reward=true")).ref


def test_training_samples_as_the_rollout_section_says():
    made = config(f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.min_p=0.1")
    sampling = training_sampling(made, stop_token_ids=(1, 2))
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 5, 1.0, 0.1)
    assert sampling.max_new_tokens == 8
    assert sampling.stop_token_ids == (1, 2)


def test_validation_is_greedy_unless_do_sample():
    keys = f"{ROLLOUT}.val_kwargs"
    greedy = validation_sampling(config(f"{keys}.temperature=0.6"), stop_token_ids=())
    assert (greedy.temperature, greedy.filters) == (0.0, False)
    drawn = validation_sampling(
        config(f"{keys}.temperature=0.6", f"{keys}.do_sample=true", f"{keys}.top_p=0.9"), stop_token_ids=()
    )
    assert (drawn.temperature, drawn.top_p) == (0.6, 0.9)
