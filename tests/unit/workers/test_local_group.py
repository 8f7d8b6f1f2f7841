import copy
from pathlib import Path

import pytest
import torch
from worker_cases import planned, sampled

from trainfer.engines.registry import make_engine
from trainfer.integrations.transformers.load import byte_tokenizer, save_model, tiny_model
from trainfer.train.update.batch import training_sequences
from trainfer.train.update.logprob import ForwardLimit
from trainfer.train.update.master import MasterWeights
from trainfer.workers.actor import ActorWorker
from trainfer.workers.local_group import LocalGroup
from trainfer.workers.ref import RefWorker
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.settings import trainer_settings

SEQUENCES = [
    sampled(prompt_ids=(5, 6, 9)[: 1 + i % 3], response_ids=tuple(range(10, 12 + i % 4)), group=i // 2)
    for i in range(8)
]


def group(*overrides, folder=Path("unused"), shuffle_seed=None):
    config, plan = planned("actor_rollout_ref.actor.optim.lr=1e-2", *overrides)
    model = tiny_model("llama", hidden_size=32, intermediate_size=64)
    actor = ActorWorker(
        MasterWeights(copy.deepcopy(model), compute_dtype=torch.float32),
        trainer_settings(config, plan, total_steps=10),
        log_prob_limit=ForwardLimit(sequences=3),
        device="cpu",
    )
    frozen = MasterWeights(
        copy.deepcopy(model).requires_grad_(requires_grad=False), compute_dtype=torch.float32
    )
    return LocalGroup(
        actor=actor,
        rollout=RolloutWorker(make_engine("builtin", model=copy.deepcopy(model))),
        ref=RefWorker(frozen, log_prob_limit=ForwardLimit(tokens=40), device="cpu"),
        rollout_dtype=torch.float32,
        mini_batch_sequences=plan.mini_batch_sequences,
        epochs=plan.ppo_epochs,
        shuffle_seed=shuffle_seed,
        model_folder=folder,
    )


def training(subject, sequences=SEQUENCES, advantages=None):
    old = [scored.logprobs for scored in subject.old_logprobs(sequences)]
    advantages = advantages or [(-1.0) ** i * (1 + i / 7) for i in range(len(sequences))]
    return training_sequences(
        sequences, advantages, old_logprobs=old, ref_logprobs=None, rollout_weights=None
    )


def test_before_any_update_actor_and_ref_score_alike():
    subject = group()
    assert subject.old_logprobs(SEQUENCES) == subject.ref_logprobs(SEQUENCES)


def test_an_update_of_two_mini_batches_and_two_epochs_takes_four_steps():
    subject = group("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2")
    report = subject.update(training(subject))
    assert report.optimizer_steps == 4
    assert report.skipped_steps == 0
    assert report.weights_version == subject.weights_version == 4
    assert report.metrics["actor/ppo_kl"] != 0.0


def test_the_first_mini_batchs_forward_scores_its_sequences_under_the_old_policy():
    subject = group("actor_rollout_ref.actor.ppo_mini_batch_size=2")
    before = subject.old_logprobs(SEQUENCES)
    report = subject.update(training(subject))
    assert list(report.scores[:4]) == before[:4]
    assert report.scores[4:] == (None,) * 4


def test_shuffled_mini_batches_score_the_sequences_that_they_drew():
    subject = group("actor_rollout_ref.actor.ppo_mini_batch_size=2", shuffle_seed=3)
    before = subject.old_logprobs(SEQUENCES)
    report = subject.update(training(subject))
    scored = [index for index, score in enumerate(report.scores) if score is not None]
    assert len(scored) == 4
    assert scored != [0, 1, 2, 3]
    assert all(report.scores[index] == before[index] for index in scored)


def test_after_a_sync_the_engine_gives_the_actors_log_probs():
    subject = group()
    subject.update(training(subject))
    proof = subject.sync_weights()
    assert proof.matches
    assert proof.weights_version == 1


def test_a_checkpoint_brings_back_weights_optimizer_and_counters_bit_for_bit(tmp_path):
    model_folder, checkpoint = tmp_path / "model", tmp_path / "global_step_1"
    save_model(tiny_model("llama"), model_folder, tokenizer=byte_tokenizer())
    straight = group(folder=model_folder)
    batch = training(straight)
    straight.update(batch)
    checkpoint.mkdir()
    straight.save_checkpoint(checkpoint)
    later = straight.update(batch)
    resumed = group(folder=model_folder)
    resumed.load_checkpoint(checkpoint)
    assert resumed.weights_version == 1
    assert resumed.update(batch).metrics == later.metrics
    assert resumed.old_logprobs(SEQUENCES) == straight.old_logprobs(SEQUENCES)
    assert (checkpoint / "huggingface" / "config.json").is_file()


def test_a_planted_non_finite_gradient_is_skipped_counted_and_leaves_the_version():
    subject = group("actor_rollout_ref.actor.ppo_mini_batch_size=2")
    report = subject.update(training(subject, advantages=[float("nan"), *[0.5] * 7]))
    assert report.skipped_steps == 1
    assert report.optimizer_steps == 2
    assert subject.weights_version == 1
    assert report.metrics["actor/skipped_steps"] == 1.0


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_micro_batch_size_leaves_the_trained_weights_equal(size):
    plain, split = group(), group(f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}")
    batch = training(plain)
    plain.update(batch)
    split.update(batch)
    before, after = plain.old_logprobs(SEQUENCES), split.old_logprobs(SEQUENCES)
    for one, other in zip(before, after, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
