"""verl's keys and values that ``trainfer train`` does not honour, as data; the first entry that fits counts.

Entries with ``refused`` speak of values of keys that are honoured; all others speak of keys that are not.

Harmless are the values with which verl itself does nothing (mostly its defaults), so that a full verl
configuration loads where it asks for nothing special. Everything else is refused with the sentence.
"""

from collections.abc import Sequence

from trainfer.config.unsupported import Unsupported

OFF: tuple[object, ...] = (None, False, 0, "", {})
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"


def _entry(
    pattern: str, sentence: str, harmless: Sequence[object] = (), refused: Sequence[object] = ()
) -> Unsupported:
    return Unsupported(pattern=pattern, sentence=sentence, harmless=harmless, refused=refused)


def _renamed(old: str, new: str) -> Unsupported:
    return _entry(old, f"is an old name; use {new}.", (None,))


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
    _entry(
        f"{_ACTOR}.optim.clip_grad",
        f"is not read; the gradient is clipped by {_ACTOR}.grad_clip.",
        (None, 1.0),
    ),
    _entry(
        f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"is another name; use {_ACTOR}.ulysses_sequence_parallel_size.",
        (1,),
    ),
    _entry(
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        f"follows the actor; use {_ACTOR}.ulysses_sequence_parallel_size.",
        (1,),
    ),
    _renamed("data.gen_batch_size", "data.train_batch_size: a step fetches exactly its own prompts"),
    _renamed("data.tokenizer", f"{_MODEL}.tokenizer_path"),
    _entry(f"{_ROLLOUT}.prompt_length", "follows data.max_prompt_length; set that."),
    _entry(f"{_ROLLOUT}.response_length", "follows data.max_response_length; set that."),
    _entry(f"{_ROLLOUT}.seed", "is not used; every sequence's draws follow from trainfer.seed.", (42,)),
    _entry(f"{_ACTOR}.rollout_n", f"follows {_ROLLOUT}.n; set that."),
    _entry(
        f"{_ACTOR}.use_remove_padding", f"follows {_MODEL}.use_remove_padding, which is always true.", (True,)
    ),
    _entry(
        "custom_reward_function.*",
        "moved to reward.custom_reward_function in verl, and is not honoured yet.",
        OFF,
    ),
    _entry(
        "algorithm.rollout_is*",
        "moved in verl; use algorithm.rollout_correction.rollout_is and its neighbours.",
        OFF,
    ),
    _entry(
        "algorithm.rollout_correction.use_policy_gradient",
        "is an old name; use algorithm.rollout_correction.loss_type=reinforce.",
        OFF,
    ),
    _entry(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        'is an old name; give both bounds as algorithm.rollout_correction.rollout_rs_threshold="low_high".',
        OFF,
    ),
    _entry(
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "is gone in verl; use algorithm.rollout_correction.rollout_rs.",
        OFF,
    ),
)

_PARTS = (
    _entry("critic.enable", "trainfer has no critic: GRPO takes its baseline from the group.", (None, False)),
    _entry("critic.*", "trainfer has no critic: GRPO takes its baseline from the group. Remove the section."),
    _entry(
        "reward_model.enable",
        "trainfer has no reward model; rewards come from the scorer of data_source.",
        OFF,
    ),
    _entry(
        "reward_model.*", "trainfer has no reward model; rewards come from the scorer of data_source.", OFF
    ),
    _entry(
        "reward.reward_model.*",
        "trainfer has no reward model; rewards come from the scorer of data_source.",
        (*OFF, 8),
    ),
    _entry(
        "reward.custom_reward_function.name",
        "a reward function of your own is not honoured yet; scorers are chosen by data_source.",
        (None, "compute_score"),
    ),
    _entry(
        "reward.custom_reward_function.*",
        "a reward function of your own is not honoured yet; scorers are chosen by data_source.",
        OFF,
    ),
    _entry(
        "reward.reward_manager.name",
        "trainfer scores each response alone, as verl's naive manager.",
        ("naive",),
    ),
    _entry("reward.reward_manager.source", "trainfer has one way to score.", ("register",)),
    _entry("reward.reward_manager.*", "a reward manager of your own is not honoured.", OFF),
    _entry("reward.sandbox_fusion.*", "trainfer runs no code of responses, in a sandbox or otherwise.", OFF),
    _entry("sandbox_fusion.*", "trainfer runs no code of responses, in a sandbox or otherwise.", OFF),
    _entry("distillation.enabled", "distillation is not honoured.", (False,)),
    _entry("distillation.*", "distillation is not honoured; remove the section."),
    _entry(
        "transfer_queue.enable",
        "trainfer has no transfer queue; sequences pass from stage to stage.",
        (False,),
    ),
    _entry("transfer_queue.*", "trainfer has no transfer queue; remove the section."),
    _entry("global_profiler.tool", "verl's profiler is not honoured.", (None,)),
    _entry("global_profiler.*", "verl's profiler is not honoured; remove the section.", OFF),
    _entry("skip.*.enable", "replaying stored rollouts is not honoured.", (False,)),
    _entry("skip.*", "replaying stored rollouts is not honoured; remove the section."),
    _entry(
        "*._target_", "names a class of verl's; nothing is created from names in a configuration. Remove it."
    ),
    _entry("*.profiler.*", "verl's profiler is not honoured; remove the section.", (*OFF, [])),
)

_ACTOR_AND_REF = (
    _entry(
        "actor_rollout_ref.*.strategy",
        "trainfer shards with PyTorch FSDP2; use fsdp2 or leave the key out.",
        (None, "fsdp2"),
    ),
    _entry(
        "actor_rollout_ref.*.megatron.*", "Megatron is not honoured; the model is sharded with PyTorch FSDP2."
    ),
    _entry("actor_rollout_ref.hybrid_engine", "actor and rollout always share their ranks.", (True,)),
    _entry("actor_rollout_ref.nccl_timeout", "the time-out of collectives cannot be set.", (600,)),
    _entry(
        f"{_ACTOR}.policy_loss.loss_mode", "only the vanilla clipped loss is honoured.", (None, "vanilla")
    ),
    _entry(f"{_ACTOR}.policy_loss.*", "belongs to losses that are not honoured; only vanilla is.", OFF),
    _entry(f"{_ACTOR}.tau_pos", "belongs to a loss (SAPO) that is not honoured.", (1.0,)),
    _entry(f"{_ACTOR}.tau_neg", "belongs to a loss (SAPO) that is not honoured.", (1.05,)),
    _entry(
        f"{_ACTOR}.loss_scale_factor", "the divisor of seq-mean-token-sum-norm cannot be set yet.", (None,)
    ),
    _entry(f"{_ACTOR}.calculate_*", "entropy is always measured; other sums are not.", (False,)),
    _entry(f"{_ACTOR}.optim.optimizer", "the optimizer is AdamW.", ("AdamW",)),
    _entry(f"{_ACTOR}.optim.optimizer_impl", "the optimizer is PyTorch's AdamW.", ("torch.optim",)),
    _entry(
        f"{_ACTOR}.optim.override_optimizer_config*", "further optimizer arguments are not honoured.", OFF
    ),
    _entry(f"{_ACTOR}.optim.zero_indexed_step", "the schedule always counts from the first step.", (True,)),
    _entry(
        f"{_ACTOR}.checkpoint.save_contents", "a checkpoint always holds everything; the key is not honoured."
    ),
    _entry(
        f"{_ACTOR}.checkpoint.*",
        "checkpoints are always complete and written at once; not honoured.",
        (False,),
    ),
    _entry(
        "*.use_torch_compile", "torch.compile is not used, because it changes the order of sums.", (False,)
    ),
    _entry("*.use_orig_params", "belongs to FSDP1; FSDP2 always keeps the parameters as they are.", (False,)),
    _entry("*.wrap_policy.*", "belongs to FSDP1; FSDP2 shards every decoder layer.", OFF),
    _entry("*.mixed_precision.buffer_dtype", "belongs to FSDP1; buffers keep their format."),
    _entry("*.fsdp_config.seed", "is not used; every seed follows from trainfer.seed.", (42,)),
    _entry("*.fsdp_config.full_determinism", "use trainfer.exact=true instead.", (False,)),
    _entry("*.fsdp_config.strategy", "trainfer shards with PyTorch FSDP2.", (None, "fsdp2")),
    _entry("*.fsdp_config.forward_only", "follows from the role: the reference model never trains."),
    _entry("*.ref.fsdp_config.*", "the reference model's sharding and formats are the actor's.", OFF),
    _entry(
        "*.fsdp_config.use_no_sync_for_gradient_accumulation",
        "gradients are always summed at the end.",
        (True,),
    ),
    _entry("*.fsdp_config.pad_to_length_bucket", "trainfer never pads.", (1024,)),
    _entry("*.pad_to_length", "trainfer never pads.", OFF),
    _entry("*.entropy_from_logits_chunk_size", "the size of entropy chunks cannot be set.", (2048,)),
    _entry("*.entropy_*", "entropy is always computed in bounded memory; the key is not honoured.", (False,)),
    _entry("*.qat.*", "training for quantisation is not honoured.", OFF),
    _entry("*.fsdp_config.*", "is not honoured by the FSDP2 sharding here.", OFF),
    _entry("*.router_replay.*", "replaying expert routing is not honoured.", (None, "disabled")),
    _entry(
        "*.use_prefix_grouper", "is not honoured; the engine shares prompts of a group by itself.", (False,)
    ),
    _entry("*.freeze_vision_tower", "vision models are not honoured.", (False,)),
    _entry("*.use_fused_kernels", "fused loss kernels are not honoured.", (False,)),
    _entry(
        "actor_rollout_ref.ref.model.*", "the reference model is a frozen copy of the actor's start.", OFF
    ),
)

_MODEL_KEYS = (
    _entry(f"{_MODEL}.trust_remote_code", "code from a model folder is never executed.", refused=(True,)),
    _entry(f"{_MODEL}.use_remove_padding", "trainfer never pads; leave it true.", refused=(False,)),
    _entry(f"{_MODEL}.lora_alpha", "LoRA is not honoured yet.", (16,)),
    _entry(f"{_MODEL}.target_modules", "LoRA is not honoured yet.", ("all-linear",)),
    _entry(f"{_MODEL}.lora*", "LoRA is not honoured yet; all weights are trained.", OFF),
    _entry(f"{_MODEL}.exclude_modules", "LoRA is not honoured yet.", OFF),
    _entry(f"{_MODEL}.external_lib", "no module is imported by name from a configuration.", OFF),
    _entry(f"{_MODEL}.override_config*", "change the model folder's config.json instead.", OFF),
    _entry(f"{_MODEL}.hf_config_path", "config.json is read from the model's folder.", OFF),
    _entry(f"{_MODEL}.use_shm", "copying the model to shared memory is not honoured.", (False,)),
    _entry(f"{_MODEL}.enable_activation_offload", "use enable_gradient_checkpointing instead.", (False,)),
    _entry(f"{_MODEL}.use_liger", "Liger kernels are not honoured.", (False,)),
    _entry(f"{_MODEL}.fused_kernel_options*", "fused loss kernels are not honoured.", (*OFF, "torch")),
    _entry(f"{_MODEL}.tiled_mlp.num_shards", "a tiled feed-forward layer is not honoured.", (4,)),
    _entry(f"{_MODEL}.tiled_mlp.*", "a tiled feed-forward layer is not honoured.", OFF),
    _entry(f"{_MODEL}.mtp.*", "multi-token prediction is not honoured; remove the section.", OFF),
)

_ROLLOUT_KEYS = (
    _entry(f"{_ROLLOUT}.name", "SGLang is not an engine here; use builtin, hf or vllm.", refused=("sglang",)),
    _entry(
        f"{_ROLLOUT}.name",
        "TensorRT-LLM is not an engine here; use builtin, hf or vllm.",
        refused=("trtllm",),
    ),
    _entry(
        f"{_ROLLOUT}.mode",
        "a step waits for its own rollouts, so that no sequence is stale; leave it out.",
        ("sync",),
    ),
    _entry(
        f"{_ROLLOUT}.calculate_log_probs", "agreement is always measured; leave it true.", refused=(False,)
    ),
    _entry(f"{_ROLLOUT}.multi_turn.enable", "multi-turn rollouts are not honoured.", (False,)),
    _entry(f"{_ROLLOUT}.multi_turn.*", "multi-turn rollouts are not honoured; remove the section.", OFF),
    _entry(f"{_ROLLOUT}.agent.default_agent_loop", "only single turns are honoured.", ("single_turn_agent",)),
    _entry(f"{_ROLLOUT}.agent.*", "agent loops are not honoured.", OFF),
    _entry(f"{_ROLLOUT}.do_sample", f"use {_ROLLOUT}.temperature=0 for greedy decoding.", (True,)),
    _entry(f"{_ROLLOUT}.ignore_eos", "a response ends at a stop token.", (False,)),
    _entry(
        f"{_ROLLOUT}.logprobs_mode",
        "log-probs are those of the sampled distribution.",
        ("processed_logprobs",),
    ),
    _entry(f"{_ROLLOUT}.full_determinism", "use trainfer.exact=true instead.", (False,)),
    _entry(f"{_ROLLOUT}.enforce_eager", "CUDA graphs of the engine cannot be switched yet.", (False,)),
    _entry(f"{_ROLLOUT}.free_cache_engine", "the engine always frees its cache for the update.", (True,)),
    _entry(
        f"{_ROLLOUT}.load_format",
        "weights come from the actor, never from a file or at random.",
        ("dummy", "auto"),
    ),
    _entry(f"{_ROLLOUT}.scheduling_policy", "requests are served in order.", ("fcfs",)),
    _entry(
        f"{_ROLLOUT}.*_parallel_size", "this form of parallelism is not honoured by the engines here.", (1,)
    ),
    _entry(f"{_ROLLOUT}.nnodes", "actor and rollout always share their ranks.", (0,)),
    _entry(f"{_ROLLOUT}.n_gpus_per_node", "actor and rollout always share their ranks.", (None,)),
    _entry(f"{_ROLLOUT}.skip_tokenizer_init", "the engine never needs a tokenizer.", (True,)),
    _entry(f"{_ROLLOUT}.disable_log_stats", "the engine's own statistics are not printed.", (True,)),
    _entry(f"{_ROLLOUT}.checkpoint_engine.backend", "weights pass straight to the engine.", ("naive",)),
    _entry(f"{_ROLLOUT}.checkpoint_engine.*", "weights pass straight to the engine.", (*OFF, 2048)),
    _entry(
        f"{_ROLLOUT}.max_model_len", "follows data.max_prompt_length + data.max_response_length.", (None,)
    ),
    _entry(f"{_ROLLOUT}.engine_kwargs*", "arguments are not passed through to an engine unseen.", OFF),
    _entry(f"{_ROLLOUT}.quantization*", "the engine's weights are the actor's, never quantised.", OFF),
    _entry(f"{_ROLLOUT}.prometheus.*", "Prometheus is not honoured; see trainer.logger.", OFF),
    _entry(
        f"{_ROLLOUT}.trace.*",
        "tracing services are not honoured; rollouts are written to rollouts/STEP.jsonl.",
        OFF,
    ),
    _entry(f"{_ROLLOUT}.disaggregation.enabled", "prefill and decode run on the same ranks.", (False,)),
    _entry(
        f"{_ROLLOUT}.disaggregation.*", "prefill and decode run on the same ranks; remove the section.", OFF
    ),
    _entry(f"{_ROLLOUT}.cudagraph_capture_sizes", "CUDA graphs of the engine cannot be set.", OFF),
    _entry(f"{_ROLLOUT}.layered_summon", "weights pass straight to the engine.", OFF),
    _entry(f"{_ROLLOUT}.over_sample_rate", "no more sequences are sampled than are trained on.", OFF),
    _entry(f"{_ROLLOUT}.multi_stage_wake_up", "the engine is woken in one go.", OFF),
    _entry(f"{_ROLLOUT}.enable_rollout_routing_replay", "replaying expert routing is not honoured.", OFF),
    _entry(f"{_ROLLOUT}.moe_load_balance_metrics_interval", "expert load is not measured.", OFF),
    _entry(f"{_ROLLOUT}.mtp*", "multi-token prediction is not honoured.", OFF),
)

_DATA_KEYS = (
    _entry("data.trust_remote_code", "code from a data or model folder is never executed.", (False,)),
    _entry("data.custom_cls.*", "a data set class of your own is not honoured; bring JSONL or Parquet.", OFF),
    _entry("data.sampler.*", "a sampler of your own is not honoured; see data.shuffle and data.seed.", OFF),
    _entry("data.datagen.*", "generating data during training is not honoured.", OFF),
    _entry("data.return_*", "is about verl's batches and has no meaning here; leave it out.", (True, False)),
    _entry(
        "data.dataloader_num_workers", "prompts are tokenised once, before training; leave it out.", (0, 8)
    ),
    _entry("data.filter_overlong_prompts_workers", "prompts are tokenised once, in one process.", (None, 1)),
    _entry("data.validation_shuffle", "the validation set keeps its order.", (False,)),
    _entry("data.tool_config_path", "tools are not honoured.", OFF),
    _entry("data.function_tool_path", "tools are not honoured.", OFF),
    _entry("data.use_shm", "copying data to shared memory is not honoured.", (False,)),
    _entry("data.image_patch_size", "images are not honoured.", (14,)),
    _entry("data.image_key", "images are not honoured.", ("images",)),
    _entry("data.video_key", "videos are not honoured.", ("videos",)),
    _entry("data.audio_key", "sound is not honoured.", ("audios",)),
    _entry("data.mm_processor_kwargs*", "images are not honoured.", OFF),
)

_ALGORITHM_KEYS = (
    _entry(
        "algorithm.adv_estimator",
        "needs a critic; use grpo.",
        refused=("gae",),
    ),
    _entry(
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
    _entry("algorithm.gamma", "GRPO does not discount.", (1.0,)),
    _entry("algorithm.lam", "belongs to GAE, which needs a critic.", (1.0,)),
    _entry("algorithm.filter_groups.enable", "filtering groups (DAPO) is not honoured yet.", (False,)),
    _entry(
        "algorithm.filter_groups.*",
        "filtering groups (DAPO) is not honoured yet; remove the section.",
        (*OFF, 1),
    ),
    _entry("algorithm.use_pf_ppo", "preference feedback PPO is not honoured.", (False,)),
    _entry(
        "algorithm.pf_ppo.*", "preference feedback PPO is not honoured; remove the section.", ("pow", 2.0)
    ),
    _entry(
        "algorithm.rollout_correction.debug_rollout_actor_probs",
        "agreement is always measured.",
        (False, True),
    ),
)

_TRAINER_KEYS = (
    _entry("trainer.device", "NPUs are not honoured; use auto, cpu or cuda.", refused=("npu",)),
    _entry("trainer.use_v1", "names a trainer of verl's; leave it out."),
    _entry("trainer.v1.trainer_mode", "a step waits for its own rollouts; only sync is honoured.", ("sync",)),
    _entry("trainer.v1.*", "belongs to trainers of verl's; remove the section."),
    _entry("trainer.use_legacy_worker_impl", "names workers of verl's; leave it out.", ("auto",)),
    _entry(
        "trainer.rollout_data_dir",
        "rollouts are always written to rollouts/STEP.jsonl in the run folder.",
        OFF,
    ),
    _entry("trainer.validation_data_dir", "validation responses are written to the run folder.", OFF),
    _entry("trainer.default_hdfs_dir", "checkpoints are written to the run folder only.", OFF),
    _entry(
        "trainer.del_local_ckpt_after_load", "a checkpoint is never deleted because it was loaded.", (False,)
    ),
    _entry("trainer.max_critic_ckpt_to_keep", "there is no critic.", OFF),
    _entry("trainer.esi_redundant_time", "expiring instances are not watched; use save_freq.", (0,)),
    _entry("trainer.ray_wait_register_center_timeout", "belongs to verl's Ray groups.", (300,)),
    _entry("trainer.profile*", "verl's profiler is not honoured.", OFF),
    _entry("ray_kwargs.timeline_json_file", "Ray's timeline is not written.", OFF),
    _entry("ray_kwargs.ray_init.runtime_env.py_executable", "workers run the Python of the driver.", OFF),
)

UNSUPPORTED: tuple[Unsupported, ...] = (
    *_RENAMED,
    *_MODEL_KEYS,
    *_ROLLOUT_KEYS,
    *_DATA_KEYS,
    *_ALGORITHM_KEYS,
    *_TRAINER_KEYS,
    *_ACTOR_AND_REF,
    *_PARTS,
)
