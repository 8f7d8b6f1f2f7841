#!/usr/bin/env bash
# one GPU, and engines of two by default
set -eu
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=./data/train.parquet \
    data.val_files=./data/val.parquet \
    data.train_batch_size=4 \
    data.max_prompt_length=32 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path=./tiny-model \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.n=2 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    "$@"
