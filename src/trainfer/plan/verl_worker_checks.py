"""What stops both verl releases while they build their workers, and settings that both ignore in silence."""

from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked
from trainfer.plan.records import Problem
from trainfer.plan.verl_config_checks import Rule
from trainfer.plan.verl_sizes import (
    divisors,
    engine_gpus,
    error,
    gpus,
    is_megatron,
    many,
    model_parallel,
    sequence_parallel,
    warning,
)


def _world_holds_whole_engines(asked: Asked) -> Iterator[Problem]:
    world, engine = gpus(asked), engine_gpus(asked)
    if world % engine:
        others = asked.count(keys.ROLLOUT_DP, 1) * asked.count(keys.ROLLOUT_PP, 1)
        times = f" x {others} (data and pipeline parallel)" if others > 1 else ""
        yield error(
            "gpus_not_divisible_by_rollout",
            "init",
            keys.TP,
            keys.ROLLOUT_DP,
            keys.ROLLOUT_PP,
            message=f"rollout engines of {engine} GPUs do not fill {many(world, 'GPU')}: {asked.named(keys.TP)}{times}. "
            f"Allowed GPUs per engine: {divisors(world)}.",
            upstream=f"rollout world_size: {world} is not divisible by infer_world_size: {engine}",
        )


def _world_holds_whole_sequence_groups(asked: Asked) -> Iterator[Problem]:
    world, size = gpus(asked), model_parallel(asked)
    if not is_megatron(asked) and world % size:
        yield error(
            "gpus_not_divisible_by_sequence_parallel",
            "init",
            keys.SP,
            message=f"{world} GPUs are not whole sequence-parallel groups of {size} ({keys.short(keys.SP)}); "
            f"{world % size} GPUs would belong to none. Set it to one of {divisors(world)}.",
        )


def shard_groups_are_whole(asked: Asked) -> Iterator[Problem]:
    """``fsdp_size`` divides the world, or is the whole of it."""
    world, size = gpus(asked), asked.whole(keys.FSDP_SIZE, -1)
    if is_megatron(asked) or size < 0 or size >= world:
        return
    if size == 0 or world % size:
        yield error(
            "gpus_not_divisible_by_fsdp_size",
            "init",
            keys.FSDP_SIZE,
            message=f"{world} GPUs are not whole shard groups of {asked.named(keys.FSDP_SIZE)}. "
            f"Set it to -1 (all GPUs) or one of {divisors(world)}.",
            upstream="integer division or modulo by zero" if size == 0 else None,
        )


def heads_split(asked: Asked) -> Iterator[Problem]:
    """The model's heads against the sequence-parallel size, where they are known."""
    size, heads, kv_heads = sequence_parallel(asked), asked.attention_heads, asked.key_value_heads
    if size == 1 or heads is None:
        return
    if heads % size:
        yield error(
            "attention_heads_not_divisible_by_sequence_parallel",
            "init",
            keys.SP,
            message=f"the model's {heads} attention heads do not split over {asked.named(keys.SP)} GPUs. "
            f"Set it to one of {divisors(heads)}.",
            upstream=f"num_attention_heads {heads} must be divisible by ulysses_sp_size {size}",
        )
    if kv_heads is not None and kv_heads % size and size % kv_heads:
        yield error(
            "key_value_heads_not_divisible_by_sequence_parallel",
            "init",
            keys.SP,
            message=f"the model's {kv_heads} key-value heads neither divide {asked.named(keys.SP)} nor are divided by it.",
            upstream=f"num_key_value_heads {kv_heads} must be divisible by ulysses_sp_size "
            f"{size}or vise versa. Upon ulysses_sp_size % num_key_value_heads == 0,"
            "kv heads are repeated to ensure correctness.",
        )


def _dynamic_ignores_sizes(asked: Asked) -> Iterator[Problem]:
    if not asked.flag(keys.DYNAMIC):
        return
    ignored = [
        key
        for key in (
            keys.MICRO,
            keys.MICRO_GLOBAL,
            keys.LOG_PROB,
            keys.LOG_PROB_GLOBAL,
            keys.REF,
            keys.REF_GLOBAL,
        )
        if key in asked.given and asked.value(key) is not None
    ]
    if ignored:
        yield warning(
            "micro_batch_size_ignored",
            "silent",
            *ignored,
            keys.DYNAMIC,
            message=f"{', '.join(asked.named(key) for key in ignored)}: ignored, because batches are dynamic "
            f"({asked.named(keys.DYNAMIC)}) and filled by tokens.",
        )


def _deprecated_global_sizes(asked: Asked) -> Iterator[Problem]:
    found = [
        key
        for key in (keys.MICRO_GLOBAL, keys.LOG_PROB_GLOBAL, keys.REF_GLOBAL)
        if not asked.flag(keys.DYNAMIC) and asked.value(key) is not None
    ]
    if found:
        yield warning(
            "deprecated_global_micro_batch_size",
            "config",
            *found,
            message=f"{', '.join(asked.named(key) for key in found)}: deprecated; counts sequences over all GPUs. "
            "Use the key that ends in _per_gpu.",
        )


def _megatron_is_only_counted(asked: Asked) -> Iterator[Problem]:
    if is_megatron(asked):
        yield warning(
            "megatron_only_counted",
            "config",
            keys.STRATEGY,
            message=f"{asked.named(keys.STRATEGY)}: the numbers use Megatron's data-parallel size and its check of "
            "dp x micro; what Megatron itself then does with them is not planned, and trainfer does not train with it.",
        )


SHARED_WORKER_RULES: tuple[Rule, ...] = (
    _world_holds_whole_engines,
    _world_holds_whole_sequence_groups,
    shard_groups_are_whole,
    heads_split,
    _dynamic_ignores_sizes,
    _deprecated_global_sizes,
    _megatron_is_only_counted,
)
