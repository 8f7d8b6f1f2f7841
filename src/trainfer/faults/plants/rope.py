"""rope.*: scaling, dtype, positions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import decoder
from trainfer.faults.pair import Pair
from trainfer.faults.plants.modules import in_bf16, replace_forward
from trainfer.faults.records import Batch, Expected, Token

_NAME = "model.rotary_emb"
_BUFFER = ("weights.buffer",)


def _from_one(batch: Batch) -> set[Token]:
    return batch.rows(start=1)


def _rotary(pair: Pair) -> Any:
    return decoder(pair.faulty).get_submodule("rotary_emb")


def _turn_frequencies(pair: Pair, factor: Tensor | float) -> None:
    module = _rotary(pair)
    module.inv_freq = module.inv_freq * factor


def plant_factor(pair: Pair) -> Sequence[Expected]:
    """Positions are scaled linearly, as where a checkpoint's rope scaling is read on one side only."""
    _turn_frequencies(pair, 1 / (1 + pair.size))
    return [Expected(cause="rope.scaling", accepted=_BUFFER, modules=(_NAME,), tokens=_from_one)]


def plant_theta(pair: Pair) -> Sequence[Expected]:
    """Another base of the frequencies."""
    module = _rotary(pair)
    count = module.inv_freq.numel()
    _turn_frequencies(pair, (1 + pair.size) ** -(torch.arange(count) / count))
    return [Expected(cause="rope.scaling", accepted=_BUFFER, modules=(_NAME,), tokens=_from_one)]


def plant_attention_factor(pair: Pair) -> Sequence[Expected]:
    """YaRN's factor on cos and sin is applied on one side only."""
    _rotary(pair).attention_scaling = 1 + pair.size
    return [Expected(cause="rope.scaling", modules=(_NAME,))]


def plant_scaled_positions(pair: Pair) -> Sequence[Expected]:
    """Positions are divided by a factor where the angles are made; no buffer shows it."""
    module = _rotary(pair)
    own = type(module).forward

    def forward(rotary: Any, x: Tensor, position_ids: Tensor) -> object:
        return own(rotary, x, position_ids=position_ids / (1 + pair.size))

    replace_forward(module, forward)
    return [Expected(cause="rope.scaling", modules=(_NAME,), tokens=_from_one)]


def plant_table_in_bf16(pair: Pair) -> Sequence[Expected]:
    """The table of cos and sin is kept in bfloat16."""
    module = _rotary(pair)
    own = type(module).forward

    def forward(rotary: Any, x: Tensor, position_ids: Tensor) -> object:
        cos, sin = own(rotary, x, position_ids=position_ids)
        return in_bf16(cos), in_bf16(sin)

    replace_forward(module, forward)
    return [Expected(cause="rope.dtype", modules=(_NAME,), tokens=_from_one)]


def plant_angles_in_bf16(pair: Pair) -> Sequence[Expected]:
    """Positions times frequencies are multiplied in bfloat16, as where a cast reaches the table's inputs."""
    module = _rotary(pair)

    def forward(rotary: Any, x: Tensor, position_ids: Tensor) -> object:
        angles = position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()
        both = torch.cat([angles, angles], -1).float()
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    replace_forward(module, forward)
    return [Expected(cause="rope.dtype", modules=(_NAME,), tokens=_from_one)]


def plant_frequencies_in_bf16(pair: Pair) -> Sequence[Expected]:
    """``model.to(bfloat16)`` reached the frequencies."""
    module = _rotary(pair)
    module.inv_freq = module.inv_freq.bfloat16().float()
    return [Expected(cause="rope.dtype", accepted=_BUFFER, modules=(_NAME,), tokens=_from_one)]


def _short(lengths: Sequence[int]) -> list[int]:
    return [sequence for sequence, length in enumerate(lengths) if length < max(lengths)]


def plant_padding_counted(pair: Pair) -> Sequence[Expected]:
    """Position ids count left padding: every row of a shorter sequence is off by its padding."""
    name = "transformer.wpe" if pair.case.architecture == "gpt2" else _NAME
    if pair.case.side == "rollout":
        pair.rollout.positions = "slots"
    else:
        pair.train.layout, pair.train.positions = "left", "slots"

    def padded_rows(batch: Batch) -> set[Token]:
        lengths = (
            batch.prompt_lengths if pair.case.side == "rollout" else [len(tokens) for tokens in batch.tokens]
        )
        return batch.rows_of(_short(lengths))

    return [Expected(cause="rope.positions", modules=(name,), tokens=padded_rows)]


def plant_decode_jumps(pair: Pair) -> Sequence[Expected]:
    """Prefill counts tokens and decode counts slots: decoded rows of padded prompts stand too far on."""
    name = "transformer.wpe" if pair.case.architecture == "gpt2" else _NAME
    pair.rollout.positions = "decode_slots"

    def decoded(batch: Batch) -> set[Token]:
        short = set(_short(batch.prompt_lengths))
        return {(s, p) for s, p in batch.rows() if s in short and p >= batch.prompt_lengths[s]}

    return [Expected(cause="rope.positions", modules=(name,), tokens=decoded)]


_SIZES = (1.0, 0.1, 0.01, 1e-3, 1e-5)
FAULTS = (
    Fault(name="rope.scaling/factor", plant=plant_factor, magnitudes=_SIZES, summary="frequencies divided by 1 + size"),
    Fault(name="rope.scaling/theta", plant=plant_theta, magnitudes=_SIZES, summary="the base times 1 + size"),
    Fault(
        name="rope.scaling/attention_factor", plant=plant_attention_factor, magnitudes=(0.4159, 0.1, 0.01, 1e-3, 1e-5),
        summary="YaRN's factor 1 + size on cos and sin is missing on one side",
    ),
    Fault(
        name="rope.scaling/positions", plant=plant_scaled_positions, magnitudes=_SIZES,
        summary="positions divided by 1 + size where angles are made",
    ),
    Fault(
        name="rope.dtype/table", plant=plant_table_in_bf16, dtypes=("float32",), summary="cos and sin kept in bfloat16"
    ),
    Fault(name="rope.dtype/angles", plant=plant_angles_in_bf16, summary="angles multiplied in bfloat16"),
    Fault(
        name="rope.dtype/frequencies", plant=plant_frequencies_in_bf16, summary="the frequencies' buffer cast to bfloat16"
    ),
    Fault(
        name="rope.positions/padding", plant=plant_padding_counted, architectures=("qwen3", "llama", "gpt2"),
        summary="position ids count left padding",
    ),
    Fault(
        name="rope.positions/decode", plant=plant_decode_jumps, sides=("rollout",),
        architectures=("qwen2", "llama", "gpt2"), summary="decode counts padding and prefill does not",
    ),
)  # fmt: skip
