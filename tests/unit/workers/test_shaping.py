import math

import pytest
from worker_cases import config, planned, sampled

from trainfer.errors import EngineError, RewardError
from trainfer.train.update.kl_control import KlControl, KlTarget
from trainfer.types import TokenScores
from trainfer.workers.settings import kl_control_of, stages
from trainfer.workers.shaping import insist_on_exact, shape


def scores(*values):
    return TokenScores(logprobs=values, sampled_logprobs=values, entropies=(0.0,) * len(values))


SEQUENCES = [sampled(group=0, sample_index=0), sampled(group=0, sample_index=1)]
OLD = [scores(-1.0, -2.0), scores(-1.5, -1.0)]
REF = [scores(-1.0, -1.5), scores(-1.0, -1.0)]


def shaped(*overrides, old=None, ref=None, kl_control=None):
    made, plan = planned(*overrides)
    control = kl_control or kl_control_of(made)
    return shape(made, stages(made, plan), SEQUENCES, [1.0, 0.0], old=old, ref=ref, kl_control=control)


def test_each_response_token_trains_with_its_sequences_advantage():
    out = shaped()
    spread = math.sqrt(0.5) + 1e-6
    assert out.advantages == pytest.approx((0.5 / spread, -0.5 / spread))
    assert out.training[0].advantages == (out.advantages[0],) * 2
    assert out.training[0].token_ids == (5, 6, 7, 1)
    assert out.training[0].prompt_length == 2
    assert out.training[0].loss_mask == (True, True)
    assert out.training[0].old_logprobs is None
    assert out.metrics == {"critic/score/near_misses": 0.0}


def test_dr_grpo_leaves_the_deviation_out():
    assert shaped("algorithm.norm_adv_by_std_in_grpo=false").advantages == (0.5, -0.5)


def test_bypass_mode_takes_the_rollouts_log_probs():
    out = shaped("algorithm.rollout_correction.bypass_mode=true")
    assert out.training[0].old_logprobs == SEQUENCES[0].rollout_logprobs


def test_old_and_ref_log_probs_reach_the_update():
    out = shaped(
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_epochs=2", old=OLD, ref=REF
    )
    assert out.training[1].old_logprobs == (-1.5, -1.0)
    assert out.training[1].ref_logprobs == (-1.0, -1.0)
    assert out.rewards == (1.0, 0.0)


def test_kl_in_the_reward_takes_the_sequences_kl_off_its_score():
    out = shaped("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1", old=OLD, ref=REF)
    assert out.rewards == pytest.approx((1.0 + 0.05, 0.05))
    assert out.metrics["actor/reward_kl_penalty"] == pytest.approx((-0.25 - 0.25) / 2)
    assert out.metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_kl_in_the_reward_of_bypass_mode_is_between_rollout_and_ref():
    sampler = [sampled(group=0, sample_index=index, rollout_logprobs=OLD[index].logprobs) for index in (0, 1)]
    made, plan = planned(
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.rollout_correction.bypass_mode=true",
    )
    out = shape(
        made, stages(made, plan), sampler, [1.0, 0.0], old=None, ref=REF, kl_control=kl_control_of(made)
    )
    assert out.rewards == pytest.approx((1.0 + 0.05, 0.05))
    assert out.training[1].old_logprobs == (-1.5, -1.0)


def test_importance_weights_compare_old_with_rollout():
    out = shaped("algorithm.rollout_correction.rollout_is=token", old=OLD)
    assert out.training[0].rollout_weights == pytest.approx((1.0, math.exp(-1.0)))
    assert "rollout_corr/rollout_is_mean" in out.metrics


def test_exact_true_stops_at_the_first_unequal_bit_and_auto_does_not():
    differs = {"mismatch/bitwise_equal_fraction": 0.999, "mismatch/logp_abs_diff_max": 1e-6}
    insist_on_exact(config(), differs)
    insist_on_exact(config("trainfer.exact=true"), {"mismatch/bitwise_equal_fraction": 1.0})
    with pytest.raises(EngineError, match=r"0\.100%"):
        insist_on_exact(config("trainfer.exact=true"), differs)


ADAPTIVE = (
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=100",
)


def test_an_adaptive_weight_follows_verls_rule():
    control = kl_control_of(config(*ADAPTIVE))
    out = shaped(*ADAPTIVE, old=OLD, ref=REF, kl_control=control)
    measured = out.metrics["actor/reward_kl_penalty"]
    assert measured == pytest.approx(-0.25)  # k1 of (-0.5, 0) and (0, -0.5): see OLD and REF
    assert out.metrics["actor/reward_kl_penalty_coeff"] == 0.1  # of this step: the move shows in the next one
    assert control.weight == pytest.approx(0.1 * (1 - 0.2 * 2 / 100))  # far below the target: clipped at -0.2


def test_an_adaptive_weight_moves_in_proportion_near_its_target():
    control = KlControl(0.5, KlTarget(kl=0.1, horizon=1000))
    control.update(0.11, sequences=50)
    assert control.weight == pytest.approx(0.5 * (1 + 0.1 * 50 / 1000))
    control.update(5.0, sequences=50)
    assert control.weight == pytest.approx(0.5 * 1.005 * (1 + 0.2 * 50 / 1000))
    fixed = KlControl(0.5)
    fixed.update(5.0, sequences=50)
    assert fixed.weight == 0.5
    with pytest.raises(RewardError, match="nan"):
        control.update(float("nan"), sequences=1)
