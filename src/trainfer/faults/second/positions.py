"""Faults of positions and rotary tables: rewritten configs, layouts of the table, dtypes, counts that are off.

Takes a pair; changes the rotary module, or GPT-2's position table, of one side.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import decoder
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected, Token
from trainfer.faults.second.patch import replace_forward

ROTARY = ("model.rotary_emb",)
LAST = 7
OFFSET = 2
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def _config(parameters: Mapping[str, Any], pair: Pair) -> list[Expected]:
    """One side read another ``rope_parameters`` from its config, and built its rotary module from it."""
    body: Any = decoder(pair.faulty)
    config = copy.deepcopy(body.rotary_emb.config)
    config.rope_parameters = dict(parameters)
    body.rotary_emb = type(body.rotary_emb)(config)
    return [Expected(cause="rope.scaling", accepted=("weights.buffer",), modules=ROTARY)]


def _tables(pair: Pair, change: Callable[[Tensor], Tensor]) -> None:
    """Cos and sin, each changed."""
    replace_forward(
        decoder(pair.faulty).get_submodule("rotary_emb"),
        lambda forward, *args, **kwargs: tuple(change(table) for table in forward(*args, **kwargs)),
    )


def interleaved(table: Tensor) -> Tensor:
    """Each frequency twice in a row, where the model's rotation wants the list twice."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def plant_interleaved(pair: Pair) -> list[Expected]:
    """A table in the other layout."""
    _tables(pair, interleaved)
    return [Expected(cause="rope.scaling", accepted=("rope.positions",), modules=ROTARY)]


def plant_half_table(pair: Pair) -> list[Expected]:
    """The table is kept in float16."""
    _tables(pair, lambda table: table.half().to(table.dtype))
    return [Expected(cause="rope.dtype", modules=ROTARY)]


def plant_half_frequencies(pair: Pair) -> list[Expected]:
    """``model.half()`` took the frequencies along."""
    rotary: Any = decoder(pair.faulty).get_submodule("rotary_emb")
    rotary.inv_freq = rotary.inv_freq.half()
    return [Expected(cause="rope.dtype", accepted=("weights.buffer",), modules=ROTARY)]


def _positions(pair: Pair, change: Callable[[Tensor], Tensor]) -> None:
    replace_forward(
        decoder(pair.faulty).get_submodule("rotary_emb"),
        lambda forward, hidden, position_ids: forward(hidden, change(position_ids)),
    )


def ahead(places: Tensor) -> Tensor:
    """One more where a single token is run."""
    return places + 1 if places.shape[-1] == 1 else places


def _decoded(batch: Batch) -> set[Token]:
    return {token for token in batch.rows() if token[1] >= batch.prompt_lengths[token[0]]}


def plant_ahead(pair: Pair) -> list[Expected]:
    """Decode counts from one, prefill from zero."""
    _positions(pair, ahead)
    return [Expected(cause="rope.positions", modules=ROTARY, tokens=_decoded)]


def plant_clamped(pair: Pair) -> list[Expected]:
    """Positions end at the table's end."""
    _positions(pair, lambda places: places.clamp(max=LAST))
    return [
        Expected(cause="rope.positions", modules=ROTARY, tokens=lambda batch: batch.rows(start=LAST + 1)),
    ]


def plant_offset(pair: Pair) -> list[Expected]:
    """A position table that starts at two, as where padding has a position."""
    replace_forward(pair.find("transformer.wpe"), lambda forward, places: forward(places + OFFSET))
    return [Expected(cause="rope.positions", modules=("transformer.wpe",), tokens=Batch.rows)]


FAULTS = (
    Fault(
        name="rope.scaling/llama3", plant=lambda pair: _config(LLAMA3, pair),
        summary="one side's config asks for Llama-3's scaling",
    ),
    Fault(
        name="rope.scaling/yarn", plant=lambda pair: _config(YARN, pair),
        summary="one side's config asks for YaRN, frequencies and factor",
    ),
    Fault(
        name="rope.scaling/interleaved", plant=plant_interleaved,
        summary="the rotary table is laid out in pairs, the rotation works on halves",
    ),
    Fault(
        name="rope.dtype/half_table", plant=plant_half_table, dtypes=("float32",),
        summary="cos and sin kept in float16",
    ),
    Fault(
        name="rope.dtype/half_frequencies", plant=plant_half_frequencies, dtypes=("float32",),
        summary="the frequencies' buffer cast to float16",
    ),
    Fault(
        name="rope.positions/decode_ahead", plant=plant_ahead, sides=("rollout",),
        summary="decode counts positions from one",
    ),
    Fault(name="rope.positions/clamped", plant=plant_clamped, summary="positions end at seven"),
    Fault(
        name="rope.positions/learned_offset", plant=plant_offset, architectures=("gpt2",),
        summary="GPT-2's position table is read two rows further on",
    ),
)  # fmt: skip
