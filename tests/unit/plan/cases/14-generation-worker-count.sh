#!/usr/bin/env bash
# 60 sequences over the 8 generation workers of the default
set -eu
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=./data/train.parquet \
    data.val_files=./data/val.parquet \
    data.train_batch_size=12 \
    data.max_prompt_length=32 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path=./tiny-model \
    actor_rollout_ref.actor.ppo_mini_batch_size=6 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=5 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=5 \
    trainer.n_gpus_per_node=2 \
    trainer.nnodes=1 \
    "$@"
