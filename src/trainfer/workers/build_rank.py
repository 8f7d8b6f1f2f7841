"""Actor, ref and engine of one rank, from the configuration: loads models, shards them where there are several ranks.

Takes configuration, plan and model folder; gives workers. Weights are read once per role: the actor's in the master
format, the ref's and the engine's in the formats that they compute in.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from trainfer.config.schema import TrainConfig
from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.exact.ulysses import check_heads
from trainfer.integrations.transformers.load import load_model
from trainfer.integrations.transformers.recompute import recompute_activations
from trainfer.integrations.transformers.structure import attention_heads, decoder_layers
from trainfer.plan.records import StepPlan
from trainfer.train.rollout.engine import Engine
from trainfer.train.update.master import MasterWeights, TrainableWeights
from trainfer.train.update.sharded import ShardedWeights, Sharding
from trainfer.workers.actor import ActorWorker, Offload
from trainfer.workers.adapter import adapt, without_adapter
from trainfer.workers.exactness import settle_exactness
from trainfer.workers.mesh import Meshes
from trainfer.workers.ref import Ref, RefWorker, SharedRef
from trainfer.workers.settings import (
    old_log_prob_limit,
    ref_log_prob_limit,
    stages,
    trainer_settings,
    vllm_settings,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_actor(
    config: TrainConfig,
    plan: StepPlan,
    model_folder: Path,
    device: torch.device,
    *,
    total_steps: int,
    meshes: Meshes | None,
) -> ActorWorker:
    """The model that trains; ``meshes`` None is the only rank.

    Raises:
        ModelError: the folder cannot be used, or its heads cannot be shared.
    """
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    model = _load(model_folder, DTYPES[fsdp.model_dtype], device, meshes)
    adapter = adapt(model, config, model_folder)
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        recompute_activations(model)
    return ActorWorker(
        _weights(model, config, meshes),
        trainer_settings(config, plan, total_steps=total_steps),
        log_prob_limit=old_log_prob_limit(plan),
        device=device,
        shard=None if meshes is None else meshes.sequence,
        offload=Offload(parameters=fsdp.param_offload, optimizer=fsdp.optimizer_offload),
        adapter=adapter,
    )


def build_ref(
    config: TrainConfig,
    plan: StepPlan,
    model_folder: Path,
    device: torch.device,
    *,
    meshes: Meshes | None,
    actor: ActorWorker,
) -> Ref | None:
    """The frozen model, where the configuration needs one; of an adapter it is the actor's own base."""
    if not stages(config, plan).ref:
        return None
    if actor.adapter is not None:
        return SharedRef(
            actor,
            without_adapter=without_adapter,
            log_prob_limit=ref_log_prob_limit(plan),
            device=device,
            shard=None if meshes is None else meshes.sequence,
        )
    model = _load(model_folder, compute_dtype(config), device, meshes).requires_grad_(requires_grad=False)
    return RefWorker(
        _weights(model, config, meshes),
        log_prob_limit=ref_log_prob_limit(plan),
        device=device,
        shard=None if meshes is None else meshes.sequence,
        offload=config.actor_rollout_ref.ref.fsdp_config.param_offload,
    )


def gets_merged_weights(config: TrainConfig) -> bool:
    """Whether an adapter reaches the engine merged into the weights; the others compute with an adapter of their own."""
    return config.actor_rollout_ref.model.trains_adapter and config.actor_rollout_ref.rollout.name == "vllm"


def load_engine(
    config: TrainConfig,
    model_folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapted: bool = True,
) -> Engine:
    """An engine that computes with a model of its own; ``adapted`` False is the bare model of the folder."""
    rollout, builtin = config.actor_rollout_ref.rollout, config.trainfer.builtin_engine
    if rollout.name == "vllm":
        return make_engine("vllm", vllm=vllm_settings(config, model_folder, device=device.type, dtype=dtype))
    limits = EngineLimits(
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        block_size=builtin.kv_block_tokens,
        cache_tokens=builtin.kv_cache_tokens,
        share_prefixes=rollout.enable_prefix_caching,
    )
    model = load_model(model_folder, dtype=dtype, device=device)
    if adapted:
        adapt(model, config, model_folder)
    settle_exactness(config, model, trains_in=compute_dtype(config))
    return make_engine(rollout.name, model=model, limits=limits)


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """Format of forward and backward."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    return DTYPES[fsdp.mixed_precision.param_dtype or fsdp.dtype]


def _load(folder: Path, dtype: torch.dtype, device: torch.device, meshes: Meshes | None) -> PreTrainedModel:
    """On the device, or in host memory where sharding is going to move it there bit by bit."""
    model = load_model(folder, dtype=dtype, device=device if meshes is None else "cpu")
    if meshes is not None and meshes.sequence is not None:
        heads = attention_heads(model)
        check_heads(heads.query, heads.key_value, meshes.sequence.size)
    return model


def _weights(model: PreTrainedModel, config: TrainConfig, meshes: Meshes | None) -> TrainableWeights:
    if meshes is None:
        return MasterWeights(model, compute_dtype=compute_dtype(config))
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    return ShardedWeights(
        model,
        decoder_layers(model),
        Sharding(
            mesh=meshes.fsdp,
            compute_dtype=compute_dtype(config),
            reduce_dtype=DTYPES[fsdp.mixed_precision.reduce_dtype or "float32"],
            reshard_after_forward=fsdp.reshard_after_forward,
        ),
    )
