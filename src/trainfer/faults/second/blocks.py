"""Faults of MLPs, routers, residuals, embeddings, dropout and sums over parts.

Takes a pair; changes forwards of one side.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS, layer_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second.patch import Forward, moved, replace_forward, write

MANY_ROWS = 8


def plant_exact_gelu(pair: Pair) -> list[Expected]:
    """The exact GELU where the model was trained with the tanh formula."""
    part = "act" if pair.case.architecture == "gpt2" else "act_fn"
    name = f"{layer_name(pair.clean, pair.case.layer)}.mlp.{part}"
    replace_forward(pair.find(name), lambda _, inputs: functional.gelu(inputs))
    return [Expected(cause="module.unknown", modules=(name,))]


def plant_swapped(pair: Pair) -> list[Expected]:
    """The halves of a fused gate-up matrix are taken in the wrong order."""
    name = f"{layer_name(pair.clean, pair.case.layer)}.mlp"
    mlp = pair.find(name)

    def swapped(_: Forward, hidden: Tensor) -> Tensor:
        return mlp.down_proj(mlp.gate_proj(hidden) * mlp.act_fn(mlp.up_proj(hidden)))

    replace_forward(mlp, swapped)
    return [Expected(cause="module.unknown", modules=(name,))]


def plant_residual(pair: Pair) -> list[Expected]:
    """A residual multiplier that the model does not have."""
    name = layer_name(pair.clean, pair.case.layer)

    def heavier(forward: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(hidden_states, *args, **kwargs) + pair.size * hidden_states

    replace_forward(pair.find(name), heavier)
    return [Expected(cause="module.unknown", modules=(name,))]


def plant_embedding_scale(pair: Pair) -> list[Expected]:
    """Gemma's embedding without its factor."""
    embedding = pair.find("model.embed_tokens")
    replace_forward(embedding, lambda _, ids: functional.embedding(ids, embedding.weight))
    return [Expected(cause="module.unknown", modules=("model.embed_tokens",))]


def _gate(pair: Pair) -> tuple[str, Any]:
    name = f"{layer_name(pair.clean, pair.case.layer)}.mlp.gate"
    return name, pair.find(name)


def plant_slots(pair: Pair) -> list[Expected]:
    """Experts' weights come back in another slot order than their ids."""
    name, gate = _gate(pair)

    def other_slots(forward: Forward, hidden: Tensor) -> tuple[Tensor, ...]:
        logits, weights, experts = forward(hidden)
        return logits, weights.flip(-1), experts

    replace_forward(gate, other_slots)
    return [Expected(cause="moe.routing", modules=(name,))]


def plant_replay(pair: Pair) -> list[Expected]:
    """Expert ids are replayed one token too late."""
    name, gate = _gate(pair)

    def late(forward: Forward, hidden: Tensor) -> tuple[Tensor, ...]:
        logits, weights, experts = forward(hidden)
        return logits, weights, experts.roll(1, dims=0)

    replace_forward(gate, late)
    return [Expected(cause="moe.routing", modules=(name,))]


def plant_dropout(pair: Pair) -> list[Expected]:
    """A frozen part was put in evaluation mode, one dropout was not."""
    mlp = f"{layer_name(pair.clean, pair.case.layer)}.mlp"
    dropout: nn.Dropout = pair.find(f"{mlp}.dropout")
    dropout.p = pair.size
    dropout.train()
    return [Expected(cause="mode.dropout", modules=(f"{mlp}.dropout", mlp))]


def _two_ranks(linear: nn.Linear) -> Forward:
    half = linear.in_features // 2

    def parts(_: Forward, inputs: Tensor) -> Tensor:
        second = functional.linear(inputs[..., half:], linear.weight[:, half:])
        return second + functional.linear(inputs[..., :half], linear.weight[:, :half])

    return parts


def plant_two_ranks(pair: Pair) -> list[Expected]:
    """Row-parallel layers add up two parts, each rounded to the model's dtype."""
    for layer in range(LAYERS):
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            linear = pair.find(f"{layer_name(pair.clean, layer)}.{part}")
            replace_forward(linear, _two_ranks(linear))
    modules = ("model.layers.0.self_attn.o_proj",)
    return [Expected(cause="shape.parallel", accepted=("shape.batch",), modules=modules)]


def _split_sums(linear: nn.Linear) -> Forward:
    def by_rows(forward: Forward, inputs: Tensor) -> Tensor:
        if inputs.numel() // inputs.shape[-1] < MANY_ROWS:
            return forward(inputs)
        parts = torch.arange(linear.in_features).chunk(4)
        total = torch.zeros_like(inputs[..., :1])
        for part in parts:
            total = total + functional.linear(inputs[..., part], linear.weight[:, part])
        return total if linear.bias is None else total + linear.bias

    return by_rows


def plant_split_sums(pair: Pair) -> list[Expected]:
    """Linear layers split their sums in four where many rows come at once, in prefill and in training."""
    for layer in range(LAYERS):
        for part in ("q_proj", "k_proj", "v_proj"):
            linear = pair.find(f"{layer_name(pair.clean, layer)}.self_attn.{part}")
            replace_forward(linear, _split_sums(linear))
    modules = ("model.layers.0.self_attn.q_proj",)
    return [Expected(cause="shape.batch", accepted=("shape.parallel",), modules=modules)]


def plant_behind(pair: Pair) -> list[Expected]:
    """The trainer is three versions ahead and says so; only its last layer and head have moved."""
    new = moved(
        pair.clean, pair.size, pair.random(), lambda name: name.startswith(("model.layers.1", "lm_head"))
    )
    write(pair.train_model, new)
    write(pair.clean, new)
    pair.versions = {"rollout": 0, "train": 3}
    return [Expected(cause="policy.staleness")]


FAULTS = (
    Fault(
        name="module.unknown/exact_gelu", plant=plant_exact_gelu, architectures=("gpt2", "gemma2"),
        dtypes=("float32",), summary="one layer has the exact GELU in place of the tanh formula",
    ),
    Fault(
        name="module.unknown/swapped", plant=plant_swapped,
        summary="one MLP takes gate for up and up for gate",
    ),
    Fault(
        name="module.unknown/residual", plant=plant_residual, magnitudes=(0.1, 0.01, 0.001),
        summary="one layer's residual counts 1 + size times",
    ),
    Fault(
        name="module.unknown/embedding_scale", plant=plant_embedding_scale, architectures=("gemma2",),
        summary="Gemma-2's embedding lacks its factor",
    ),
    Fault(
        name="moe.routing/slots", plant=plant_slots, architectures=("mixtral",),
        summary="one router's weights stand in another order than its experts",
    ),
    Fault(
        name="moe.routing/replay", plant=plant_replay, architectures=("mixtral",), sides=("train",),
        summary="one router's experts are replayed one token too late",
    ),
    Fault(
        name="mode.dropout/one_module", plant=plant_dropout, architectures=("gpt2",), sides=("train",),
        magnitudes=(0.3, 0.1, 0.05), summary="one dropout of GPT-2 is on in training (size: its rate)",
    ),
    Fault(
        name="shape.parallel/two_ranks", plant=plant_two_ranks,
        summary="row-parallel layers add up two parts in the model's dtype",
    ),
    Fault(
        name="shape.batch/split_sums", plant=plant_split_sums, sides=("train",),
        summary="q, k and v split their sums in four where eight or more rows come at once",
    ),
    Fault(
        name="policy.staleness/behind", plant=plant_behind, sides=("train",), magnitudes=(0.1, 0.01, 0.001),
        summary="training is three versions ahead in its last layer and head, and says so",
    ),
)  # fmt: skip
