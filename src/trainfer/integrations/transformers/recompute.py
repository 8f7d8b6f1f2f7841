"""Activation checkpointing of a Transformers model without its training mode.

Transformers recomputes a layer only while that layer is in training mode, which would also switch dropout on:
the policy that trains would not be the policy that samples. So the mode is set on the layers alone, not on
what is inside them, where dropout lives.
"""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainfer.errors import ModelError


def recompute_activations(model: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward; everything else stays in eval mode.

    Raises:
        ModelError: the architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} does not support activation checkpointing; set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=false."
        )
    model.eval()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
