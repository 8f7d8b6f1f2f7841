"""Full dotted names of the keys that batch arithmetic reads, under verl's names, once."""

_A = "actor_rollout_ref"

TRAIN = "data.train_batch_size"
GEN = "data.gen_batch_size"
VAL = "data.val_batch_size"
PROMPT_TOKENS = "data.max_prompt_length"
RESPONSE_TOKENS = "data.max_response_length"

MODEL_PATH = f"{_A}.model.path"
REMOVE_PADDING = f"{_A}.model.use_remove_padding"
LORA_RANK = f"{_A}.model.lora_rank"
CHECKPOINTING = f"{_A}.model.enable_gradient_checkpointing"

STRATEGY = f"{_A}.actor.strategy"
MINI = f"{_A}.actor.ppo_mini_batch_size"
MICRO = f"{_A}.actor.ppo_micro_batch_size_per_gpu"
MICRO_GLOBAL = f"{_A}.actor.ppo_micro_batch_size"
DYNAMIC = f"{_A}.actor.use_dynamic_bsz"
TOKENS = f"{_A}.actor.ppo_max_token_len_per_gpu"
EPOCHS = f"{_A}.actor.ppo_epochs"
SHUFFLE = f"{_A}.actor.shuffle"
LOSS_AGG = f"{_A}.actor.loss_agg_mode"
KL_LOSS = f"{_A}.actor.use_kl_loss"
KL_REWARD = "algorithm.use_kl_in_reward"
SP = f"{_A}.actor.ulysses_sequence_parallel_size"
SP_FSDP = f"{_A}.actor.fsdp_config.ulysses_sequence_parallel_size"
FSDP_SIZE = f"{_A}.actor.fsdp_config.fsdp_size"
PARAM_OFFLOAD = f"{_A}.actor.fsdp_config.param_offload"
OPTIMIZER_OFFLOAD = f"{_A}.actor.fsdp_config.optimizer_offload"
MEGATRON_TP = f"{_A}.actor.megatron.tensor_model_parallel_size"
MEGATRON_PP = f"{_A}.actor.megatron.pipeline_model_parallel_size"
MEGATRON_CP = f"{_A}.actor.megatron.context_parallel_size"

N = f"{_A}.rollout.n"
ENGINE = f"{_A}.rollout.name"
MODE = f"{_A}.rollout.mode"
TEMPERATURE = f"{_A}.rollout.temperature"
TOP_K = f"{_A}.rollout.top_k"
TOP_P = f"{_A}.rollout.top_p"
MIN_P = f"{_A}.rollout.min_p"
TP = f"{_A}.rollout.tensor_model_parallel_size"
ROLLOUT_DP = f"{_A}.rollout.data_parallel_size"
ROLLOUT_PP = f"{_A}.rollout.pipeline_model_parallel_size"
MEMORY_SHARE = f"{_A}.rollout.gpu_memory_utilization"
WORKERS = f"{_A}.rollout.agent.num_workers"
VAL_N = f"{_A}.rollout.val_kwargs.n"
VAL_SAMPLE = f"{_A}.rollout.val_kwargs.do_sample"
LOG_PROB = f"{_A}.rollout.log_prob_micro_batch_size_per_gpu"
LOG_PROB_GLOBAL = f"{_A}.rollout.log_prob_micro_batch_size"
LOG_PROB_DYNAMIC = f"{_A}.rollout.log_prob_use_dynamic_bsz"
LOG_PROB_TOKENS = f"{_A}.rollout.log_prob_max_token_len_per_gpu"
REF = f"{_A}.ref.log_prob_micro_batch_size_per_gpu"
REF_GLOBAL = f"{_A}.ref.log_prob_micro_batch_size"
REF_DYNAMIC = f"{_A}.ref.log_prob_use_dynamic_bsz"
REF_TOKENS = f"{_A}.ref.log_prob_max_token_len_per_gpu"

ADVANTAGE = "algorithm.adv_estimator"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT_WEIGHTS = "algorithm.rollout_correction.rollout_is"
FILTER_GROUPS = "algorithm.filter_groups.enable"
CRITIC = "critic.enable"
CRITIC_MINI = "critic.ppo_mini_batch_size"
CRITIC_MICRO = "critic.ppo_micro_batch_size_per_gpu"
CRITIC_MICRO_GLOBAL = "critic.ppo_micro_batch_size"
CRITIC_DYNAMIC = "critic.use_dynamic_bsz"
REWARD_MODEL = "reward_model.enable"
REWARD_MODEL_DYNAMIC = "reward_model.use_dynamic_bsz"
REWARD_MODEL_MICRO = "reward_model.micro_batch_size_per_gpu"
REWARD_MODEL_MICRO_GLOBAL = "reward_model.micro_batch_size"

GPUS = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
BALANCE = "trainer.balance_batch"
V1 = "trainer.use_v1"
TRAINER_MODE = "trainer.v1.trainer_mode"
SYNC_EVERY = "trainer.v1.separate_async.parameter_sync_step"
REFILL = "trainer.v1.sampler.sync_refill_failed_groups"

COUNTS: tuple[str, ...] = (
    TRAIN, GEN, PROMPT_TOKENS, RESPONSE_TOKENS, MINI, MICRO, MICRO_GLOBAL, TOKENS, EPOCHS, SP, SP_FSDP,
    MEGATRON_TP, MEGATRON_PP, MEGATRON_CP, N, TP, ROLLOUT_DP, ROLLOUT_PP, WORKERS, VAL_N, LOG_PROB,
    LOG_PROB_GLOBAL, LOG_PROB_TOKENS, REF, REF_GLOBAL, REF_TOKENS, CRITIC_MINI, CRITIC_MICRO,
    CRITIC_MICRO_GLOBAL, GPUS, NODES, SYNC_EVERY,
)  # fmt: skip
"""Keys that hold a positive whole number, or null."""

WHOLES: tuple[str, ...] = (FSDP_SIZE, LORA_RANK)
"""Keys that hold a whole number of either sign."""

FLAGS: tuple[str, ...] = (
    REMOVE_PADDING, DYNAMIC, SHUFFLE, KL_LOSS, KL_REWARD, VAL_SAMPLE, LOG_PROB_DYNAMIC, REF_DYNAMIC,
    FILTER_GROUPS, CRITIC, CRITIC_DYNAMIC, REWARD_MODEL, REWARD_MODEL_DYNAMIC, BALANCE, V1, REFILL,
    PARAM_OFFLOAD, OPTIMIZER_OFFLOAD, CHECKPOINTING, BYPASS,
)  # fmt: skip
"""Keys that hold true or false, or null."""

OTHERS: tuple[str, ...] = (
    VAL, MODEL_PATH, STRATEGY, LOSS_AGG, ENGINE, MODE, TEMPERATURE, MEMORY_SHARE, ADVANTAGE, TRAINER_MODE,
    REWARD_MODEL_MICRO, REWARD_MODEL_MICRO_GLOBAL, TOP_K, TOP_P, MIN_P, ROLLOUT_WEIGHTS,
)  # fmt: skip

ALL: tuple[str, ...] = COUNTS + WHOLES + FLAGS + OTHERS
"""Every key that some rule reads."""


def short(key: str) -> str:
    """The last two parts of a key: enough to recognise it in a sentence."""
    return ".".join(key.split(".")[-2:])
