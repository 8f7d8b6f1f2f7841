#!/usr/bin/env bash
# values in arrays and environment variables with defaults
set -eu
TB=${TRAIN_BATCH_SIZE:-512}
MINI=${PPO_MINI_BATCH_SIZE:-256}
DATA=(
    data.train_files=./data/train.parquet
    data.val_files=./data/val.parquet
    data.train_batch_size=${TB}
    data.max_prompt_length=${MAX_PROMPT_LENGTH:-1024}
    data.max_response_length=${MAX_RESPONSE_LENGTH:-1024}
)
ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH:-REPLACE_MODEL}
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=${MINI}
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=${MICRO:-2}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000
    actor_rollout_ref.actor.use_kl_loss=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.n=${ROLLOUT_N:-5}
    actor_rollout_ref.rollout.tensor_model_parallel_size=${ROLLOUT_TP:-2}
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8192
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
    trainer.n_gpus_per_node=${NGPUS_PER_NODE:-8} trainer.nnodes=${NNODES:-1} "$@"
