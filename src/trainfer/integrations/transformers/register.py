"""Makes trainfer's attention function known to Transformers."""

from transformers import AttentionInterface

from trainfer.exact.attention import ATTENTION_NAME, attention


def register_attention() -> None:
    """Register under ``ATTENTION_NAME``; idempotent.

    The name is deliberately not registered with the mask interface: Transformers then builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, attention)
