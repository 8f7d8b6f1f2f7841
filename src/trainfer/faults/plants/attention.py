"""attention.*: masks, windows, packed neighbours, soft-cap, split keys, precision."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainfer.faults.attention import Call, Change, change_attention
from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS, WINDOW, attention_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected, Token

_ALL = ("qwen2", "qwen3", "llama", "gpt2", "gemma2")


def _plant(pair: Pair, change: Change, layers: Sequence[int] | None = None) -> str:
    """Change attention in the case's layer, or in some; gives the first one's name."""
    layers = [pair.case.layer] if layers is None else layers
    for layer in layers:
        name = attention_name(pair.faulty, layer)
        change_attention(pair.faulty, pair.find(name), change)
    return attention_name(pair.faulty, min(layers))


def plant_not_causal(pair: Pair) -> Sequence[Expected]:
    """Queries see later tokens of their own sequence: the causal mask is missing where a whole sequence is run."""

    def both_ways(call: Call) -> Call:
        allowed = call.allowed
        if allowed.shape[-1] != allowed.shape[-2]:
            return call
        real = allowed.diagonal(dim1=-2, dim2=-1)[..., None, :]
        return replace(call, mask=call.mask_of(allowed | (allowed.mT & real)))

    def rows(batch: Batch) -> set[Token]:
        if pair.case.side == "train":
            return batch.rows()
        return {(s, p) for s, length in enumerate(batch.prompt_lengths) for p in range(length - 1)}

    return [Expected(cause="attention.mask", modules=(_plant(pair, both_ways),), tokens=rows)]


def plant_padding_seen(pair: Pair) -> Sequence[Expected]:
    """The mask of padding is ignored by the kernel: rows of left-padded sequences see padding as tokens."""
    if pair.case.side == "train":
        pair.train.layout = "left"

    def causal_only(call: Call) -> Call:
        queries, keys = call.allowed.shape[-2:]
        places = torch.arange(keys)
        allowed = (places[None] <= places[keys - queries :, None]).expand_as(call.allowed)
        return replace(call, mask=call.mask_of(allowed))

    def rows(batch: Batch) -> set[Token]:
        lengths = batch.prompt_lengths if pair.case.side == "rollout" else [len(t) for t in batch.tokens]
        return batch.rows_of([s for s, length in enumerate(lengths) if length < max(lengths)])

    return [Expected(cause="attention.mask", modules=(_plant(pair, causal_only),), tokens=rows)]


def plant_window_applied(pair: Pair) -> Sequence[Expected]:
    """A kernel applies a sliding window that the model does not have."""
    width = int(pair.size)

    def windowed(call: Call) -> Call:
        allowed = call.allowed
        queries, keys = allowed.shape[-2:]
        places = torch.arange(keys)
        near = places[None] > places[keys - queries :, None] - width
        return replace(call, mask=call.mask_of(allowed & near))

    return [
        Expected(
            cause="attention.window",
            modules=(_plant(pair, windowed),),
            tokens=lambda batch: batch.rows(start=width),
        )
    ]


def plant_window_ignored(pair: Pair) -> Sequence[Expected]:
    """A side runs Gemma-2's sliding layer with full attention."""
    model = pair.faulty
    model.config.layer_types = ["full_attention"] * LAYERS
    name = attention_name(model, 0)
    attention = pair.find(name)
    attention.layer_type, attention.sliding_window = "full_attention", None
    return [
        Expected(cause="attention.window", modules=(name,), tokens=lambda batch: batch.rows(start=WINDOW))
    ]


def plant_packed_neighbours(pair: Pair) -> Sequence[Expected]:
    """Packed sequences see those before them: positions restart and the mask does not know."""
    pair.train.layout, pair.train.leak = "packed", True

    def rows(batch: Batch) -> set[Token]:
        return batch.rows_of(range(1, len(batch.tokens)))

    return [
        Expected(cause="attention.cross_sequence", modules=(attention_name(pair.faulty, 0),), tokens=rows)
    ]


def plant_cap_dropped(pair: Pair) -> Sequence[Expected]:
    """Gemma-2's cap on attention scores is dropped."""
    return [
        Expected(cause="attention.softcap", modules=(_plant(pair, lambda call: replace(call, softcap=None)),))
    ]


def plant_other_cap(pair: Pair) -> Sequence[Expected]:
    """The cap is another number."""
    factor = 1 + pair.size

    def other(call: Call) -> Call:
        assert call.softcap is not None
        return replace(call, softcap=call.softcap * factor)

    return [Expected(cause="attention.softcap", modules=(_plant(pair, other),))]


def plant_other_scale(pair: Pair) -> Sequence[Expected]:
    """Scores are multiplied by another number than one over the root of the head's size."""
    factor = 1 + pair.size
    name = _plant(pair, lambda call: replace(call, scaling=call.scaling * factor))
    return [Expected(cause="attention.scale", modules=(name,), tokens=lambda batch: batch.rows(start=1))]


SPLIT = 8
"""Keys in the first part where attention is split."""


def _merged(call: Call, *, natural: bool) -> Tensor:
    """Two parts of the keys, merged by their log-sum-exp, or by what is not it."""
    scores, values = call.scores().float(), call.values().float()
    parts = []
    for part in (slice(None, SPLIT), slice(SPLIT, None)):
        piece = scores[..., part]
        top = piece.amax(-1, keepdim=True)
        weight = (piece - top).exp()
        total = weight.sum(-1, keepdim=True)
        lse = top + (total.log() if natural else total.log2())
        parts.append((weight @ values[..., part, :] / total, lse))
    (first, a), (second, b) = parts
    share = torch.sigmoid(a - b)
    return (share * first + (1 - share) * second).to(call.query.dtype)


def plant_wrong_merge(pair: Pair) -> Sequence[Expected]:
    """Parts of a split context are merged by a log-sum-exp to base two beside natural maxima."""

    def split(call: Call) -> Call | Tensor:
        return _merged(call, natural=False) if call.key.shape[2] > SPLIT else call

    # Queries that see no key of the second part take all from the first, whatever the merge.
    name = _plant(pair, split)

    def rows(batch: Batch) -> set[Token]:
        return batch.rows() if pair.train.layout == "none" else _beyond_split(pair, batch)

    return [Expected(cause="attention.merge", modules=(name,), tokens=rows)]


def _beyond_split(pair: Pair, batch: Batch) -> set[Token]:
    """Rows whose slot lies beyond the first part, with some real key on either side of the split."""
    longest = max(batch.prompt_lengths if pair.case.side == "rollout" else [len(t) for t in batch.tokens])
    rows: set[Token] = set()
    for s, p in batch.rows():
        length = batch.prompt_lengths[s] if pair.case.side == "rollout" else len(batch.tokens[s])
        pad = longest - length if pair.case.side == "rollout" or pair.train.layout == "left" else 0
        if pad < SPLIT <= p + pad:
            rows.add((s, p))
    return rows


def plant_weights_in_bf16(pair: Pair) -> Sequence[Expected]:
    """A kernel computes the softmax in bfloat16."""

    def soft(call: Call) -> Tensor:
        lowest = torch.finfo(torch.bfloat16).min
        weights = call.scores().clamp(min=lowest).bfloat16().softmax(-1)
        return weights.to(call.query.dtype) @ call.values()

    return [Expected(cause="attention.backend", modules=(_plant(pair, soft),))]


def plant_scores_in_bf16(pair: Pair) -> Sequence[Expected]:
    """A kernel takes queries and keys in bfloat16 on a side that is otherwise float32, in every layer."""

    def soft(call: Call) -> Call:
        dtype = call.query.dtype
        cast = {"query": call.query, "key": call.key, "value": call.value}
        return replace(call, **{name: tensor.bfloat16().to(dtype) for name, tensor in cast.items()})

    return [Expected(cause="attention.backend", modules=(_plant(pair, soft, range(LAYERS)),))]


FAULTS = (
    Fault(
        name="attention.mask/causal", plant=plant_not_causal, architectures=_ALL,
        summary="no causal mask in one layer, where a whole sequence is run at once",
    ),
    Fault(
        name="attention.mask/padding", plant=plant_padding_seen, architectures=_ALL[:4],
        summary="the kernel ignores the mask of left padding",
    ),
    Fault(
        name="attention.window/applied", plant=plant_window_applied, magnitudes=(4.0, 6.0, 8.0, 10.0, 12.0),
        summary="a window that the model does not have (size in tokens)",
    ),
    Fault(
        name="attention.window/ignored", plant=plant_window_ignored, architectures=("gemma2",),
        summary="Gemma-2's window is not applied",
    ),
    Fault(
        name="attention.cross_sequence/packed", plant=plant_packed_neighbours, sides=("train",), architectures=_ALL,
        layouts=("packed",), summary="packed sequences attend to those before them",
    ),
    Fault(
        name="attention.softcap/dropped", plant=plant_cap_dropped, architectures=("gemma2",),
        summary="Gemma-2's cap on scores is dropped in one layer",
    ),
    Fault(
        name="attention.scale/other", plant=plant_other_scale, architectures=_ALL[:4],
        magnitudes=(0.5, 0.1, 0.01, 1e-3, 1e-5), summary="the scale of scores times 1 + size",
    ),
    Fault(
        name="attention.softcap/other", plant=plant_other_cap, architectures=("gemma2",),
        magnitudes=(0.5, 0.1, 0.01, 1e-3, 1e-5), summary="the cap times 1 + size",
    ),
    Fault(
        name="attention.merge/lse", plant=plant_wrong_merge, layouts=("left", "right"),
        summary="two parts of the context merged by log2 of the sums beside natural maxima",
    ),
    Fault(
        name="attention.backend/softmax", plant=plant_weights_in_bf16, architectures=_ALL[:4],
        summary="one layer's softmax in bfloat16",
    ),
    Fault(
        name="attention.backend/bf16", plant=plant_scores_in_bf16, dtypes=("float32",), architectures=_ALL[:4],
        summary="every layer's attention takes its inputs in bfloat16",
    ),
)  # fmt: skip
