"""verl's keys and values that ``trainfer train`` does not honour, as data; the first entry that fits counts.

Entries with ``refused`` speak of values of keys that are honoured; all others speak of keys that are not.

Harmless are the values with which verl itself does nothing (mostly its defaults), so that a full verl
configuration loads where it asks for nothing special. Everything else is refused with the sentence.
"""

from trainfer.config.unsupported import OFF, Unsupported, entry
from trainfer.config.unsupported_model import ACTOR_AND_REF, MODEL_KEYS, ROLLOUT_KEYS

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"


def _renamed(old: str, new: str) -> Unsupported:
    return entry(old, f"is an old name; use {new}.", (None,))


_RENAMED = (
    _renamed(f"{_ACTOR}.ppo_micro_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu (sequences per rank)"),
    _renamed(
        f"{_ROLLOUT}.log_prob_micro_batch_size",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu (sequences per rank)",
    ),
    _renamed(
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu (sequences per rank)",
    ),
    _renamed(f"{_ACTOR}.optim.warmup_style", f"{_ACTOR}.optim.lr_scheduler_type"),
    entry(
        f"{_ACTOR}.optim.clip_grad",
        f"is not read; the gradient is clipped by {_ACTOR}.grad_clip.",
        (None, 1.0),
    ),
    entry(
        f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"is another name; use {_ACTOR}.ulysses_sequence_parallel_size.",
        (1,),
    ),
    entry(
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        f"follows the actor; use {_ACTOR}.ulysses_sequence_parallel_size.",
        (1,),
    ),
    _renamed("data.gen_batch_size", "data.train_batch_size: a step fetches exactly its own prompts"),
    _renamed("data.tokenizer", f"{_MODEL}.tokenizer_path"),
    entry(f"{_ROLLOUT}.prompt_length", "follows data.max_prompt_length; set that."),
    entry(f"{_ROLLOUT}.response_length", "follows data.max_response_length; set that."),
    entry(f"{_ROLLOUT}.seed", "is not used; every sequence's draws follow from trainfer.seed.", (42,)),
    entry(f"{_ACTOR}.rollout_n", f"follows {_ROLLOUT}.n; set that."),
    entry(
        f"{_ACTOR}.use_remove_padding", f"follows {_MODEL}.use_remove_padding, which is always true.", (True,)
    ),
    entry(
        "custom_reward_function.*",
        "moved to reward.custom_reward_function in verl, and is not honoured yet.",
        OFF,
    ),
    entry(
        "algorithm.rollout_is*",
        "moved in verl; use algorithm.rollout_correction.rollout_is and its neighbours.",
        OFF,
    ),
    entry(
        "algorithm.rollout_correction.use_policy_gradient",
        "is an old name of loss_type=reinforce, which is not implemented; use loss_type=ppo_clip.",
        OFF,
    ),
    entry(
        "algorithm.rollout_correction.loss_type",
        "the REINFORCE loss of bypass mode is not implemented; use ppo_clip.",
        refused=("reinforce",),
    ),
    entry(
        "algorithm.rollout_correction.rollout_rs*",
        "rejecting tokens or sequences is not implemented; use rollout_is=token or sequence with rollout_is_threshold.",
        OFF,
    ),
    entry(
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "is gone in verl, and rejecting sequences is not implemented.",
        OFF,
    ),
)

_PARTS = (
    entry("critic.enable", "trainfer has no critic: GRPO takes its baseline from the group.", (None, False)),
    entry("critic.*", "trainfer has no critic: GRPO takes its baseline from the group. Remove the section."),
    entry(
        "reward_model.enable",
        "trainfer has no reward model; rewards come from the scorer of data_source.",
        OFF,
    ),
    entry(
        "reward_model.*", "trainfer has no reward model; rewards come from the scorer of data_source.", OFF
    ),
    entry(
        "reward.reward_model.*",
        "trainfer has no reward model; rewards come from the scorer of data_source.",
        (*OFF, 8),
    ),
    entry(
        "reward.custom_reward_function.name",
        "a reward function of your own is not honoured yet; scorers are chosen by data_source.",
        (None, "compute_score"),
    ),
    entry(
        "reward.custom_reward_function.*",
        "a reward function of your own is not honoured yet; scorers are chosen by data_source.",
        OFF,
    ),
    entry(
        "reward.reward_manager.name",
        "trainfer scores each response alone, as verl's naive manager.",
        ("naive",),
    ),
    entry("reward.reward_manager.source", "trainfer has one way to score.", ("register",)),
    entry("reward.reward_manager.*", "a reward manager of your own is not honoured.", OFF),
    entry("reward.sandbox_fusion.*", "trainfer runs no code of responses, in a sandbox or otherwise.", OFF),
    entry("sandbox_fusion.*", "trainfer runs no code of responses, in a sandbox or otherwise.", OFF),
    entry("distillation.enabled", "distillation is not honoured.", (False,)),
    entry("distillation.*", "distillation is not honoured; remove the section."),
    entry(
        "transfer_queue.enable",
        "trainfer has no transfer queue; sequences pass from stage to stage.",
        (False,),
    ),
    entry("transfer_queue.*", "trainfer has no transfer queue; remove the section."),
    entry("global_profiler.tool", "verl's profiler is not honoured.", (None,)),
    entry("global_profiler.*", "verl's profiler is not honoured; remove the section.", OFF),
    entry(
        "model_engine",
        "names the sharding of verl's workers; trainfer uses PyTorch FSDP2.",
        ("dp", "fsdp", "fsdp2"),
    ),
    entry("skip.*.enable", "replaying stored rollouts is not honoured.", (False,)),
    entry("skip.*", "replaying stored rollouts is not honoured; remove the section."),
    entry(
        "*._target_", "names a class of verl's; nothing is created from names in a configuration. Remove it."
    ),
    entry("*.profiler.*", "verl's profiler is not honoured; remove the section.", (*OFF, [])),
)

_DATA_KEYS = (
    entry("data.trust_remote_code", "code from a data or model folder is never executed.", (False,)),
    entry("data.custom_cls.*", "a data set class of your own is not honoured; bring JSONL or Parquet.", OFF),
    entry("data.sampler.*", "a sampler of your own is not honoured; see data.shuffle and data.seed.", OFF),
    entry("data.datagen.*", "generating data during training is not honoured.", OFF),
    entry("data.return_*", "is about verl's batches and has no meaning here; leave it out.", (True, False)),
    entry(
        "data.dataloader_num_workers", "prompts are tokenised once, before training; leave it out.", (0, 8)
    ),
    entry("data.filter_overlong_prompts_workers", "prompts are tokenised once, in one process.", (None, 1)),
    entry("data.validation_shuffle", "the validation set keeps its order.", (False,)),
    entry("data.tool_config_path", "tools are not honoured.", OFF),
    entry("data.function_tool_path", "tools are not honoured.", OFF),
    entry("data.use_shm", "copying data to shared memory is not honoured.", (False,)),
    entry("data.image_patch_size", "images are not honoured.", (14,)),
    entry("data.image_key", "images are not honoured.", ("images",)),
    entry("data.video_key", "videos are not honoured.", ("videos",)),
    entry("data.audio_key", "sound is not honoured.", ("audios",)),
    entry("data.mm_processor_kwargs*", "images are not honoured.", OFF),
)

_ALGORITHM_KEYS = (
    entry(
        "algorithm.adv_estimator",
        "needs a critic; use grpo.",
        refused=("gae",),
    ),
    entry(
        "algorithm.adv_estimator",
        "is not honoured yet; use grpo.",
        refused=(
            "grpo_passk",
            "grpo_vectorized",
            "rloo",
            "rloo_vectorized",
            "remax",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "opo",
            "gpg",
            "optimal_token_baseline",
        ),
    ),
    entry("algorithm.gamma", "GRPO does not discount.", (1.0,)),
    entry("algorithm.lam", "belongs to GAE, which needs a critic.", (1.0,)),
    entry("algorithm.filter_groups.enable", "filtering groups (DAPO) is not honoured yet.", (False,)),
    entry(
        "algorithm.filter_groups.*",
        "filtering groups (DAPO) is not honoured yet; remove the section.",
        (*OFF, 1),
    ),
    entry("algorithm.use_pf_ppo", "preference feedback PPO is not honoured.", (False,)),
    entry("algorithm.pf_ppo.*", "preference feedback PPO is not honoured; remove the section.", ("pow", 2.0)),
    entry(
        "algorithm.rollout_correction.debug_rollout_actor_probs",
        "agreement is always measured.",
        (False, True),
    ),
)

_TRAINER_KEYS = (
    entry("trainer.device", "NPUs are not honoured; use auto, cpu or cuda.", refused=("npu",)),
    entry("trainer.use_v1", "names a trainer of verl's; leave it out."),
    entry("trainer.v1.trainer_mode", "a step waits for its own rollouts; only sync is honoured.", ("sync",)),
    entry("trainer.v1.*", "belongs to trainers of verl's; remove the section."),
    entry("trainer.use_legacy_worker_impl", "names workers of verl's; leave it out.", ("auto",)),
    entry("trainer.log_val_generations", "validation responses are written to the run folder instead.", OFF),
    entry(
        "trainer.rollout_data_dir",
        "rollouts are always written to rollouts/STEP.jsonl in the run folder.",
        OFF,
    ),
    entry("trainer.validation_data_dir", "validation responses are written to the run folder.", OFF),
    entry("trainer.default_hdfs_dir", "checkpoints are written to the run folder only.", OFF),
    entry(
        "trainer.del_local_ckpt_after_load", "a checkpoint is never deleted because it was loaded.", (False,)
    ),
    entry("trainer.max_critic_ckpt_to_keep", "there is no critic.", OFF),
    entry("trainer.esi_redundant_time", "expiring instances are not watched; use save_freq.", (0,)),
    entry("trainer.ray_wait_register_center_timeout", "belongs to verl's Ray groups.", (300,)),
    entry("trainer.checkpoint_callback_class", "no class is created from a name in a configuration.", OFF),
    entry("trainer.profile*", "verl's profiler is not honoured.", OFF),
    entry("ray_kwargs.timeline_json_file", "Ray's timeline is not written.", OFF),
    entry("ray_kwargs.ray_init.runtime_env.py_executable", "workers run the Python of the driver.", OFF),
)

UNSUPPORTED: tuple[Unsupported, ...] = (
    *_RENAMED,
    *MODEL_KEYS,
    *ROLLOUT_KEYS,
    *_DATA_KEYS,
    *_ALGORITHM_KEYS,
    *_TRAINER_KEYS,
    *ACTOR_AND_REF,
    *_PARTS,
)
