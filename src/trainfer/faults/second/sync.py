"""Faults of the weights' way to the engine: rollbacks, lost buckets and shards, names that do not load, copies.

Takes a pair; moves or keeps parameters of one side. Adapters have a module of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfer.faults.fault import Fault
from trainfer.faults.models import decoder, layer_name, module_of
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second.patch import moved, replace_forward, snapshot, write

UPDATE = 0.1
"""Relative size of an update where the fault itself has no size."""
SIZES = (0.1, 0.01, 0.001)


def plant_rollback(pair: Pair) -> list[Expected]:
    """Two updates arrive; after the second the engine wakes up with its first weights."""
    first = snapshot(pair.rollout_model)
    draw = pair.random()
    pair.steps = 3

    def update(pair: Pair, step: int) -> None:
        new = moved(pair.train_model, pair.size, draw)
        for model in (pair.clean, pair.train_model):
            write(model, new)
        write(pair.rollout_model, new if step == 1 else first)

    pair.between.append(update)
    return [Expected(cause="weights.stale", modules=("model.embed_tokens",), first_step=2)]


def _update(pair: Pair, old: Callable[[str], bool], size: float = UPDATE) -> None:
    """One update that has reached the trainer, and the rollout but for the names of ``old``."""
    new = moved(pair.clean, size, pair.random())
    for model in (pair.clean, pair.train_model):
        write(model, new)
    write(pair.rollout_model, new, lambda name: not old(name))


def plant_second_bucket(pair: Pair) -> list[Expected]:
    """The sync's second bucket is lost: the last layer, the final norm and the head."""
    _update(pair, lambda name: not name.startswith(("model.embed_tokens", "model.layers.0.")), pair.size)
    return [Expected(cause="weights.stale", modules=("model.layers.1.input_layernorm",))]


def plant_shard(pair: Pair) -> list[Expected]:
    """One rank's rows of one matrix are old."""
    owner = f"{layer_name(pair.clean, pair.case.layer)}.mlp.down_proj"
    old = module_of(pair.rollout_model, owner).weight.detach().clone()
    _update(pair, lambda _: False)
    with torch.no_grad():
        module_of(pair.rollout_model, owner).weight[: len(old) // 2].copy_(old[: len(old) // 2])
    return [Expected(cause="weights.stale", accepted=("weights.missing",), modules=(owner,))]


def plant_norms_not_loaded(pair: Pair) -> list[Expected]:
    """The engine's loader skips two names: query and key norms stay at one."""
    for name, parameter in pair.rollout_model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.ones_(parameter)
    modules = ("model.layers.0.self_attn.q_norm",)
    return [Expected(cause="weights.missing", accepted=("weights.stale",), modules=modules)]


def plant_biases_not_loaded(pair: Pair) -> list[Expected]:
    """The engine's loader skips biases: they stay at zero."""
    for name, parameter in pair.rollout_model.named_parameters():
        if name.endswith("_proj.bias"):
            nn.init.zeros_(parameter)
    modules = ("model.layers.0.self_attn.q_proj",)
    return [Expected(cause="weights.missing", accepted=("weights.stale",), modules=modules)]


def plant_two_optimisers(pair: Pair) -> list[Expected]:
    """The trainer's head is a parameter of its own that the optimiser moves; checkpoints keep the embedding alone."""
    head = module_of(pair.train_model, "lm_head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    _update(pair, lambda _: False)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(pair.seed + 1)
        noise = torch.randn(head.weight.shape, generator=draw) * head.weight.float().std()
        head.weight.add_(UPDATE * noise)
    return [Expected(cause="weights.tied_head", modules=("lm_head",))]


def plant_gate_up(pair: Pair) -> list[Expected]:
    """Gate and up are written into copies that the state dict made of the fused weight; the live ones stay old."""
    _update(pair, lambda name: "gate_proj" in name or "up_proj" in name, pair.size)
    return [Expected(cause="weights.fused_copy", modules=("model.layers.0.mlp.gate_proj",))]


def plant_fused_qkv(pair: Pair) -> list[Expected]:
    """One layer's q, k and v compute with a fused matrix that was put together before the update."""
    name = f"{layer_name(pair.clean, pair.case.layer)}.self_attn"
    parts = ("q_proj", "k_proj", "v_proj")
    attention = module_of(pair.rollout_model, name)
    fused = torch.cat([attention.get_submodule(part).weight.detach() for part in parts])
    sizes = [len(attention.get_submodule(part).weight) for part in parts]
    _update(pair, lambda _: False, pair.size)
    for part, weight in zip(parts, fused.split(sizes), strict=True):
        _compute_with(attention.get_submodule(part), weight)
    return [Expected(cause="weights.cached_copy", modules=(f"{name}.q_proj",))]


def plant_head_copy(pair: Pair) -> list[Expected]:
    """The engine's head computes with a copy in float32 that was made at its start."""
    head = module_of(pair.rollout_model, "lm_head")
    held = head.weight.detach().clone()
    _update(pair, lambda _: False, pair.size)
    _compute_with(head, held.float())
    return [Expected(cause="weights.cached_copy", modules=("lm_head",))]


def _compute_with(linear: Any, weight: Tensor) -> None:
    replace_forward(
        linear,
        lambda _, inputs: functional.linear(inputs.to(weight.dtype), weight, linear.bias).to(inputs.dtype),
    )


def plant_buffer(pair: Pair) -> list[Expected]:
    """Sleep and wake-up: half of the rotary frequencies were not restored."""
    frequencies = module_of(decoder(pair.faulty), "rotary_emb").inv_freq
    frequencies[len(frequencies) // 2 :] = 0.0
    return [Expected(cause="weights.buffer", accepted=("rope.scaling",), modules=("model.rotary_emb",))]


FAULTS = (
    Fault(
        name="weights.stale/rollback", plant=plant_rollback, sides=("rollout",), magnitudes=SIZES,
        summary="after its second update the engine wakes up with its first weights (size: relative update)",
    ),
    Fault(
        name="weights.stale/second_bucket", plant=plant_second_bucket, sides=("rollout",), magnitudes=SIZES,
        summary="the last layer, the final norm and the head miss an update (size: relative update)",
    ),
    Fault(
        name="weights.stale/shard", plant=plant_shard, sides=("rollout",),
        summary="half of one matrix's rows miss an update",
    ),
    Fault(
        name="weights.missing/norms", plant=plant_norms_not_loaded, sides=("rollout",), architectures=("qwen3",),
        summary="the engine's query and key norms stay at one",
    ),
    Fault(
        name="weights.missing/biases", plant=plant_biases_not_loaded, sides=("rollout",), architectures=("qwen2",),
        summary="the engine's biases stay at zero",
    ),
    Fault(
        name="weights.tied_head/optimiser", plant=plant_two_optimisers, sides=("train",),
        architectures=("qwen2_tied",), summary="the trainer's head moves apart from the embedding it is tied to",
    ),
    Fault(
        name="weights.fused_copy/gate_up", plant=plant_gate_up, sides=("rollout",), magnitudes=SIZES,
        summary="gate and up of every layer miss an update (size: relative update)",
    ),
    Fault(
        name="weights.cached_copy/fused_qkv", plant=plant_fused_qkv, sides=("rollout",), magnitudes=SIZES,
        summary="one layer's q, k and v compute with a matrix fused before the update (size: relative update)",
    ),
    Fault(
        name="weights.cached_copy/head", plant=plant_head_copy, sides=("rollout",), magnitudes=SIZES,
        summary="the head computes with a copy from before the update (size: relative update)",
    ),
    Fault(
        name="weights.buffer/half", plant=plant_buffer, summary="half of the rotary frequencies are zero",
    ),
)  # fmt: skip
