"""head.*: precision, padded vocabulary, adapter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainfer.faults.fault import Fault
from trainfer.faults.models import VOCABULARY
from trainfer.faults.pair import Pair
from trainfer.faults.plants.modules import replace_forward
from trainfer.faults.plants.weights import adapt
from trainfer.faults.records import Expected

_NAME = "lm_head"


def plant_precision(pair: Pair) -> Sequence[Expected]:
    """One side's head in bfloat16 beside float32, or in float32 beside bfloat16."""
    other = torch.bfloat16 if pair.case.dtype == "float32" else torch.float32

    def forward(module: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(other), module.weight.to(other)).float()

    replace_forward(pair.find(_NAME), forward)
    return [Expected(cause="head.dtype", modules=(_NAME,))]


def plant_logits_rounded(pair: Pair) -> Sequence[Expected]:
    """The head computes in float32 and its logits are handed on in bfloat16."""

    def forward(module: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, module.weight).bfloat16()

    replace_forward(pair.find(_NAME), forward)
    return [Expected(cause="head.dtype", modules=(_NAME,))]


def plant_padded_weight(pair: Pair) -> Sequence[Expected]:
    """The vocabulary is padded to a round number, and the added rows of zeros take part in the softmax."""
    head = pair.find(_NAME)
    extra = torch.zeros(16, head.weight.shape[1], dtype=head.weight.dtype)
    head.weight = nn.Parameter(torch.cat([head.weight.detach(), extra]))
    return [Expected(cause="head.padded_vocab", modules=(_NAME,))]


def plant_padded_logits(pair: Pair) -> Sequence[Expected]:
    """The buffer of logits is wider than the vocabulary, and its zeros take part in the softmax."""

    def forward(module: Any, x: Tensor) -> Tensor:
        return nn.functional.pad(nn.functional.linear(x, module.weight), (0, 80 - VOCABULARY))

    replace_forward(pair.find(_NAME), forward)
    return [Expected(cause="head.padded_vocab", modules=(_NAME,))]


def plant_adapter(pair: Pair) -> Sequence[Expected]:
    """The head's adapter is not applied in the rollout."""
    adapt(pair, [_NAME], 0.0)
    return [Expected(cause="head.adapter", accepted=("weights.adapter_missing",), modules=(_NAME,))]


FAULTS = (
    Fault(name="head.dtype/compute", plant=plant_precision, summary="the head computes in bfloat16 beside float32, or the other way"),
    Fault(name="head.dtype/logits", plant=plant_logits_rounded, dtypes=("float32",), summary="logits handed on in bfloat16"),
    Fault(name="head.padded_vocab/weight", plant=plant_padded_weight, summary="16 rows of zeros more in the head"),
    Fault(name="head.padded_vocab/logits", plant=plant_padded_logits, summary="16 logits of zero more, same weights"),
    Fault(name="head.adapter/missing", plant=plant_adapter, sides=("rollout",), summary="the head's adapter is not applied"),
)  # fmt: skip
