"""What sharding needs to know about a Transformers model: its layers and its attention heads."""

from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainfer.errors import ModelError

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Entries of a config's ``layer_types`` whose rows meet in attention alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Of one layer."""

    query: int
    key_value: int


class _Config:
    """Attributes that are read of a text config."""

    num_attention_heads: int
    num_key_value_heads: int
    layer_types: list[str] | None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, in order.

    Raises:
        ModelError: it has none that Transformers marks as such.
    """
    layers: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} marks no decoder layers, so it cannot be sharded over ranks; set "
            "trainer.n_gpus_per_node=1 and trainer.nnodes=1 or use another architecture."
        )
    return layers


def attention_heads(model: PreTrainedModel) -> Heads:
    """Heads that sequence parallelism divides.

    Raises:
        ModelError: some layer mixes rows otherwise than by attention.
    """
    config = model.config.get_text_config()
    known = config.to_dict()
    others = sorted(set(known.get("layer_types") or ()) - set(ATTENTION_LAYERS))
    if others:
        raise ModelError(
            f"{type(model).__name__} has layers of the kind {', '.join(others)}, whose rows cannot be shared among ranks; set "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1."
        )
    typed = cast(_Config, config)
    query = typed.num_attention_heads
    return Heads(query=query, key_value=known.get("num_key_value_heads") or query)
