"""Entries of the table of unsupported keys for ``actor_rollout_ref``; see ``unsupported_table``."""

from trainfer.config.unsupported import OFF, entry

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"

ACTOR_AND_REF = (
    entry(
        "actor_rollout_ref.*.strategy",
        "trainfer shards with PyTorch FSDP2; use fsdp2 or leave the key out.",
        (None, "fsdp2"),
    ),
    entry(
        "actor_rollout_ref.*.megatron.*", "Megatron is not honoured; the model is sharded with PyTorch FSDP2."
    ),
    entry("actor_rollout_ref.hybrid_engine", "actor and rollout always share their ranks.", (True,)),
    entry("actor_rollout_ref.nccl_timeout", "the time-out of collectives cannot be set.", (600,)),
    entry(f"{_ACTOR}.policy_loss.loss_mode", "only the vanilla clipped loss is honoured.", (None, "vanilla")),
    entry(f"{_ACTOR}.policy_loss.*", "belongs to losses that are not honoured; only vanilla is.", OFF),
    entry(f"{_ACTOR}.tau_pos", "belongs to a loss (SAPO) that is not honoured.", (1.0,)),
    entry(f"{_ACTOR}.tau_neg", "belongs to a loss (SAPO) that is not honoured.", (1.05,)),
    entry(
        f"{_ACTOR}.loss_scale_factor", "the divisor of seq-mean-token-sum-norm cannot be set yet.", (None,)
    ),
    entry(f"{_ACTOR}.calculate_*", "entropy is always measured; other sums are not.", (False,)),
    entry(f"{_ACTOR}.optim.optimizer", "the optimizer is AdamW.", ("AdamW",)),
    entry(f"{_ACTOR}.optim.optimizer_impl", "the optimizer is PyTorch's AdamW.", ("torch.optim",)),
    entry(f"{_ACTOR}.optim.override_optimizer_config*", "further optimizer arguments are not honoured.", OFF),
    entry(f"{_ACTOR}.optim.zero_indexed_step", "the schedule always counts from the first step.", (True,)),
    entry(
        f"{_ACTOR}.checkpoint.save_contents", "a checkpoint always holds everything; the key is not honoured."
    ),
    entry(
        f"{_ACTOR}.checkpoint.*",
        "a checkpoint is always complete; only async_save is honoured.",
        (False,),
    ),
    entry(
        "*.use_torch_compile", "torch.compile is not used, because it changes the order of sums.", (False,)
    ),
    entry("*.use_orig_params", "belongs to FSDP1; FSDP2 always keeps the parameters as they are.", (False,)),
    entry("*.wrap_policy.*", "belongs to FSDP1; FSDP2 shards every decoder layer.", OFF),
    entry("*.mixed_precision.buffer_dtype", "belongs to FSDP1; buffers keep their format."),
    entry("*.fsdp_config.seed", "is not used; every seed follows from trainfer.seed.", (42,)),
    entry("*.fsdp_config.full_determinism", "use trainfer.exact=true instead.", (False,)),
    entry("*.fsdp_config.strategy", "trainfer shards with PyTorch FSDP2.", (None, "fsdp2")),
    entry("*.fsdp_config.forward_only", "follows from the role: the reference model never trains."),
    entry("*.ref.fsdp_config.*", "the reference model's sharding and formats are the actor's.", OFF),
    entry(
        "*.fsdp_config.use_no_sync_for_gradient_accumulation",
        "gradients are always summed at the end.",
        (True,),
    ),
    entry("*.fsdp_config.pad_to_length_bucket", "trainfer never pads.", (1024,)),
    entry("*.pad_to_length", "trainfer never pads.", OFF),
    entry("*.entropy_from_logits_chunk_size", "the size of entropy chunks cannot be set.", (2048,)),
    entry("*.entropy_*", "entropy is always computed in bounded memory; the key is not honoured.", (False,)),
    entry("*.qat.*", "training for quantisation is not honoured.", OFF),
    entry("*.fsdp_config.*", "is not honoured by the FSDP2 sharding here.", OFF),
    entry("*.router_replay.*", "replaying expert routing is not honoured.", (None, "disabled")),
    entry(
        "*.use_prefix_grouper", "is not honoured; the engine shares prompts of a group by itself.", (False,)
    ),
    entry("*.freeze_vision_tower", "vision models are not honoured.", (False,)),
    entry("*.use_fused_kernels", "fused loss kernels are not honoured.", (False,)),
    entry("actor_rollout_ref.ref.rollout_n", f"follows {_ROLLOUT}.n; set that."),
    entry("actor_rollout_ref.ref.model*", "the reference model is a frozen copy of the actor's start.", OFF),
)

MODEL_KEYS = (
    entry(f"{_MODEL}.trust_remote_code", "code from a model folder is never executed.", refused=(True,)),
    entry(f"{_MODEL}.use_remove_padding", "trainfer never pads; leave it true.", refused=(False,)),
    entry(f"{_MODEL}.lora.*", "belongs to Megatron; use lora_rank, lora_alpha and target_modules.", OFF),
    entry(f"{_MODEL}.external_lib", "no module is imported by name from a configuration.", OFF),
    entry(f"{_MODEL}.override_config*", "change the model folder's config.json instead.", OFF),
    entry(f"{_MODEL}.hf_config_path", "config.json is read from the model's folder.", OFF),
    entry(f"{_MODEL}.use_shm", "copying the model to shared memory is not honoured.", (False,)),
    entry(f"{_MODEL}.enable_activation_offload", "use enable_gradient_checkpointing instead.", (False,)),
    entry(f"{_MODEL}.use_liger", "Liger kernels are not honoured.", (False,)),
    entry(f"{_MODEL}.fused_kernel_options*", "fused loss kernels are not honoured.", (*OFF, "torch")),
    entry(f"{_MODEL}.tiled_mlp.num_shards", "a tiled feed-forward layer is not honoured.", (4,)),
    entry(f"{_MODEL}.tiled_mlp.*", "a tiled feed-forward layer is not honoured.", OFF),
    entry(f"{_MODEL}.mtp.*", "multi-token prediction is not honoured; remove the section.", OFF),
)

ROLLOUT_KEYS = (
    entry(f"{_ROLLOUT}.name", "SGLang is not an engine here; use builtin, hf or vllm.", refused=("sglang",)),
    entry(
        f"{_ROLLOUT}.name",
        "TensorRT-LLM is not an engine here; use builtin, hf or vllm.",
        refused=("trtllm",),
    ),
    entry(
        f"{_ROLLOUT}.mode",
        "a step waits for its own rollouts, so that no sequence is stale; leave it out.",
        ("sync",),
    ),
    entry(
        f"{_ROLLOUT}.calculate_log_probs", "agreement is always measured; leave it true.", refused=(False,)
    ),
    entry(f"{_ROLLOUT}.multi_turn.enable", "multi-turn rollouts are not honoured.", (False,)),
    entry(f"{_ROLLOUT}.multi_turn.*", "multi-turn rollouts are not honoured; remove the section.", OFF),
    entry(f"{_ROLLOUT}.agent.default_agent_loop", "only single turns are honoured.", ("single_turn_agent",)),
    entry(f"{_ROLLOUT}.agent.*", "agent loops are not honoured.", OFF),
    entry(f"{_ROLLOUT}.do_sample", f"use {_ROLLOUT}.temperature=0 for greedy decoding.", (True,)),
    entry(f"{_ROLLOUT}.ignore_eos", "a response ends at a stop token.", (False,)),
    entry(
        f"{_ROLLOUT}.logprobs_mode",
        "log-probs are those of the sampled distribution.",
        ("processed_logprobs",),
    ),
    entry(f"{_ROLLOUT}.full_determinism", "use trainfer.exact=true instead.", (False,)),
    entry(f"{_ROLLOUT}.enforce_eager", "CUDA graphs of the engine cannot be switched yet.", (False,)),
    entry(f"{_ROLLOUT}.free_cache_engine", "the engine always frees its cache for the update.", (True,)),
    entry(
        f"{_ROLLOUT}.load_format",
        "weights come from the actor, never from a file or at random.",
        ("dummy", "auto", "safetensors"),
    ),
    entry(f"{_ROLLOUT}.scheduling_policy", "requests are served in order.", ("fcfs",)),
    entry(
        f"{_ROLLOUT}.*_parallel_size", "this form of parallelism is not honoured by the engines here.", (1,)
    ),
    entry(f"{_ROLLOUT}.nnodes", "actor and rollout always share their ranks.", (0,)),
    entry(f"{_ROLLOUT}.n_gpus_per_node", "actor and rollout always share their ranks.", (None,)),
    entry(f"{_ROLLOUT}.skip_tokenizer_init", "the engine never needs a tokenizer.", (True,)),
    entry(f"{_ROLLOUT}.disable_log_stats", "the engine's own statistics are not printed.", (True,)),
    entry(f"{_ROLLOUT}.checkpoint_engine.backend", "weights pass straight to the engine.", ("naive",)),
    entry(f"{_ROLLOUT}.checkpoint_engine.*", "weights pass straight to the engine.", (*OFF, 2048)),
    entry(f"{_ROLLOUT}.max_model_len", "follows data.max_prompt_length + data.max_response_length.", (None,)),
    entry(f"{_ROLLOUT}.engine_kwargs*", "arguments are not passed through to an engine unseen.", OFF),
    entry(f"{_ROLLOUT}.quantization*", "the engine's weights are the actor's, never quantised.", OFF),
    entry(f"{_ROLLOUT}.prometheus.*", "Prometheus is not honoured; see trainer.logger.", OFF),
    entry(
        f"{_ROLLOUT}.trace.*",
        "tracing services are not honoured; rollouts are written to rollouts/STEP.jsonl.",
        OFF,
    ),
    entry(f"{_ROLLOUT}.disaggregation.enabled", "prefill and decode run on the same ranks.", (False,)),
    entry(
        f"{_ROLLOUT}.disaggregation.*", "prefill and decode run on the same ranks; remove the section.", OFF
    ),
    entry(f"{_ROLLOUT}.cudagraph_capture_sizes", "CUDA graphs of the engine cannot be set.", OFF),
    entry(f"{_ROLLOUT}.layered_summon", "weights always pass tensor by tensor.", (*OFF, True)),
    entry(f"{_ROLLOUT}.over_sample_rate", "no more sequences are sampled than are trained on.", OFF),
    entry(f"{_ROLLOUT}.multi_stage_wake_up", "the engine is woken in one go.", OFF),
    entry(f"{_ROLLOUT}.enable_rollout_routing_replay", "replaying expert routing is not honoured.", OFF),
    entry(f"{_ROLLOUT}.moe_load_balance_metrics_interval", "expert load is not measured.", OFF),
    entry(f"{_ROLLOUT}.qat*", "training for quantisation is not honoured.", OFF),
    entry(f"{_ROLLOUT}.router_config_path", "requests are not routed between servers.", OFF),
    entry(f"{_ROLLOUT}.skip_*", "replaying stored rollouts is not honoured; leave it out.", OFF),
    entry(f"{_ROLLOUT}.update_weights_bucket_megabytes", "weights pass straight to the engine.", (2048,)),
    entry(f"{_ROLLOUT}.mtp*", "multi-token prediction is not honoured.", OFF),
)
