"""Faults of the head: the hidden state's dtype, float16, a vocabulary padded by resizing or by memory that was there.

Takes a pair; changes the head of one side.
"""

import torch
from torch import Tensor
from torch.nn import functional

from trainfer.faults.fault import Fault
from trainfer.faults.models import VOCABULARY
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second.patch import Forward, replace_forward

PADDED = 80
HEAD = ("lm_head",)


def plant_hidden(pair: Pair) -> list[Expected]:
    """A head in float32 that is handed the hidden state in bfloat16."""
    replace_forward(pair.find("lm_head"), lambda forward, hidden: forward(hidden.bfloat16().to(hidden.dtype)))
    return [Expected(cause="head.dtype", modules=HEAD)]


def plant_half(pair: Pair) -> list[Expected]:
    """A head in float16, its logits in float32."""
    head = pair.find("lm_head")

    def half(_: Forward, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.half(), head.weight.half()).float()

    replace_forward(head, half)
    return [Expected(cause="head.dtype", modules=HEAD)]


def plant_resized(pair: Pair) -> list[Expected]:
    """Embedding and head grow to a round number of rows, and the new rows are drawn as at the start of a training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(pair.seed)
        pair.faulty.resize_token_embeddings(PADDED, mean_resizing=False)
    return [Expected(cause="head.padded_vocab", modules=(*HEAD, "model.embed_tokens"))]


def plant_memory(pair: Pair) -> list[Expected]:
    """Sixteen logits more, from memory that held others."""

    def longer(forward: Forward, hidden: Tensor) -> Tensor:
        logits = forward(hidden)
        return torch.cat([logits, logits[..., : PADDED - VOCABULARY].flip(-1)], dim=-1)

    replace_forward(pair.find("lm_head"), longer)
    return [Expected(cause="head.padded_vocab", modules=HEAD)]


FAULTS = (
    Fault(
        name="head.dtype/hidden", plant=plant_hidden, dtypes=("float32",),
        summary="the head is handed its hidden state in bfloat16",
    ),
    Fault(name="head.dtype/half", plant=plant_half, summary="the head computes in float16"),
    Fault(
        name="head.padded_vocab/resized", plant=plant_resized,
        summary="embedding and head are resized to 80 rows, the new ones random",
    ),
    Fault(
        name="head.padded_vocab/memory", plant=plant_memory,
        summary="16 logits more that repeat others, same weights",
    ),
)  # fmt: skip
