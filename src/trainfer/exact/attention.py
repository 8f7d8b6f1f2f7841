"""The one attention function of trainer and builtin engine, behind Transformers' attention interface.

Takes query, key and value of one packed row axis ``[1, heads, T, K]`` and a *plan* that says which row
belongs to which sequence; gives ``[1, T, H, K]``. The plan is built once per forward, shared by all
layers, and travels through the model's forward keywords under ``attention_plan``. Two plans exist:
``exact.plan.PackedPlan`` (training and prefill) and the builtin engine's cache plans (prefill, decode).

Why a keyword, not a context variable or a module attribute: Transformers' decoder layers hand unknown
keywords down to the attention function, and activation checkpointing keeps them in the closure that it
runs again in the backward, when a context variable would long hold another micro-batch's plan.

Shapes decide bits. The CPU kernel sums in the same order for a row alone and for the same row in any
batch if keys start at index 0, key lengths are ``safe_key_length`` and query blocks hold at least 4 rows;
so both plans call ``causal_attention`` or ``decode_attention`` below and keep these rules. ``calibration`` measures
the safe lengths of a machine; with wrong ones results stay right, but are not bitwise equal.

Leaves out: cross attention, bidirectional attention, attention sinks, position biases (refused by name).

Axes: T rows, n sequences of one group, H query heads, G key/value heads, L key length, K head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfer.errors import ModelError
from trainfer.exact.rules import KEY_BLOCK, key_lengths

ATTENTION_NAME = "trainfer"
"""The name under which integrations register ``attention``."""

QUERY_MULTIPLE = 16
"""Query rows per sequence in training and prefill; below 4 rows the kernel changes."""
DECODE_QUERY_ROWS = 4
"""Query rows per key/value head in decode: the heads of a group, padded to this many."""

_PLAIN_KEYWORDS = frozenset(
    {"is_causal", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
     "output_router_logits", "num_items_in_batch", "return_dict"}
)  # fmt: skip
"""Keywords that models hand down and that change nothing here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """What one layer's attention is, apart from its rows."""

    layer: int
    scale: float
    window: int | None
    """A row sees itself and the ``window - 1`` rows before it; None is all."""
    softcap: float | None
    """Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2, arXiv 2408.00118, section 2)."""
    dropout: float


class AttentionPlan(Protocol):
    """Which rows attend to which."""

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[T, H, K]``."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; see the module docstring.

    Args:
        module: The attention layer; ``layer_idx`` and ``is_causal`` are read.
        query: ``[1, H, T, K]``, rotary positions applied.
        key: ``[1, G, T, K]``; H is a multiple of G.
        value: ``[1, G, T, K]``.
        attention_mask: Must be None: the plan alone decides who sees whom.
        scaling: Factor of the scores; None is ``K ** -0.5``.
        dropout: Probability on attention weights, honoured in training.
        sliding_window: See ``AttentionForm``.
        softcap: See ``AttentionForm``.
        attention_plan: The plan of this forward.
        others: Keywords the model hands down; those that would change the result are refused, such as
            ``is_causal=False``.

    Returns:
        ``[1, T, H, K]`` and None (no attention weights).

    Raises:
        ModelError: The layer asks for something that this function does not compute.
    """
    _refuse_unsupported(module, attention_mask, others)
    if attention_plan is None:
        raise ModelError(
            f"the attention implementation {ATTENTION_NAME!r} was called without a plan: call the model through "
            "trainfer.exact.packed.forward_logits or the builtin engine, or load it with attention='sdpa' to call it directly"
        )
    if query.shape[0] != 1:
        raise ModelError(
            f"the attention implementation {ATTENTION_NAME!r} takes one packed row axis, got a batch of {query.shape[0]}; "
            "pack the sequences with trainfer.exact.packed.pack"
        )
    form = AttentionForm(
        layer=_layer_index(module),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    query_THK, key_TGK, value_TGK = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention_plan.attend(query_THK, key_TGK, value_TGK, form).unsqueeze(0), None


def _layer_index(module: nn.Module) -> int:
    index = vars(module).get("layer_idx")
    if not isinstance(index, int):
        raise ModelError(
            f"{type(module).__name__} has no layer_idx, so its cached keys cannot be told apart; use another model"
        )
    return index


def _refuse_unsupported(module: nn.Module, mask: Tensor | None, others: dict[str, object]) -> None:
    name = type(module).__name__
    if others.get("is_causal") is False or vars(module).get("is_causal") is False:
        raise ModelError(
            f"{name}.is_causal is False: only causal attention can be trained and sampled; use a causal LM"
        )
    if mask is not None:
        raise ModelError(
            f"{name} was given an attention mask; rows are packed without padding, leave attention_mask out"
        )
    for key, item in others.items():
        if item is not None and key not in _PLAIN_KEYWORDS:
            raise ModelError(
                f"{name} passes {key} to its attention function, which {ATTENTION_NAME!r} does not compute; "
                "use a model without it (supported: scaling, dropout, sliding_window, softcap)"
            )


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is at least ``count``."""
    return -(-count // multiple) * multiple


def safe_key_length(length: int) -> int:
    """The smallest key length >= ``length`` whose masked tail changes no bit of the CPU kernel's result."""
    return key_lengths().padded(length)


class QueryChunk(NamedTuple):
    """Query rows at positions ``start`` to ``end - 1``, with the first ``keys`` keys."""

    start: int
    end: int
    keys: int


def query_chunks(length: int, first: int = 0) -> list[QueryChunk]:
    """Split query rows ``first`` to ``length - 1`` so that each has only the keys it needs.

    Ends lie at safe lengths, so that short rows never pay for keys that are there for padding: under ``rules.MEASURED``
    208 rows give ``[(0, 192, 192), (192, 208, 384)]``, 400 rows ``[(0, 192, 192), (192, 384, 384), (384, 400, 400)]``.
    """
    cuts = key_lengths().cuts
    chunks: list[QueryChunk] = []
    start = first
    while start < length:
        block = start // KEY_BLOCK * KEY_BLOCK
        end = min(length, next(block + cut for cut in cuts if block + cut > start))
        chunks.append(QueryChunk(start, end, safe_key_length(end)))
        start = end
    return chunks


def causal_attention(
    query_nHLK: Tensor,
    key_nGLK: Tensor,
    value_nGLK: Tensor,
    form: AttentionForm,
    chunks: Sequence[QueryChunk],
    masks: dict[tuple[QueryChunk, int | None], Tensor],
) -> Tensor:
    """Causal attention of sequences that start at key 0.

    Args:
        query_nHLK: Rows from the first chunk's start on, a multiple of ``QUERY_MULTIPLE``.
        key_nGLK: At least as many keys as the last chunk names.
        value_nGLK: Likewise.
        form: The layer's form.
        chunks: From ``query_chunks``, or one chunk for kernels that need no splitting.
        masks: Additive masks of chunks that were asked for before; new ones are put in.

    Returns:
        ``[n, H, L, K]``.
    """
    first = chunks[0].start
    parts = [
        masked_attention(
            query_nHLK[:, :, chunk.start - first : chunk.end - first],
            key_nGLK[:, :, : chunk.keys],
            value_nGLK[:, :, : chunk.keys],
            form,
            _causal_mask(chunk, form, query_nHLK, masks),
        )
        for chunk in chunks
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _causal_mask(
    chunk: QueryChunk, form: AttentionForm, query: Tensor, masks: dict[tuple[QueryChunk, int | None], Tensor]
) -> Tensor | None:
    """None where the kernel's own causal mask does: the first chunk, without window or soft-cap."""
    windowed = form.window is not None and form.window < chunk.end
    if chunk.start == 0 and not windowed and form.softcap is None:
        return None
    window = form.window if windowed else None
    if (chunk, window) not in masks:
        row = torch.arange(chunk.start, chunk.end, device=query.device)[:, None]
        column = torch.arange(chunk.keys, device=query.device)[None, :]
        seen = column <= row
        if window is not None:
            seen &= column > row - window
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        masks[chunk, window] = mask.masked_fill_(~seen, float("-inf"))
    return masks[chunk, window]


def decode_attention(
    query_BHK: Tensor, key_BGLK: Tensor, value_BGLK: Tensor, form: AttentionForm, mask_BL: Tensor
) -> Tensor:
    """One query row per sequence against its cached keys.

    The query heads that share a key/value head become the rows of one attention problem: the kernel then
    reads each key once, and no repetition is needed.

    Args:
        query_BHK: One row per slot.
        key_BGLK: Cached keys from position 0; finite also where masked.
        value_BGLK: Likewise.
        form: The layer's form; its window must be in the mask already.
        mask_BL: Added to the scores: 0 where a key is seen, -inf elsewhere; the query's dtype.

    Returns:
        ``[B, H, K]``.
    """
    batch, heads, size = query_BHK.shape
    groups = key_BGLK.shape[1]
    rows = heads // groups
    query = query_BHK.reshape(batch, groups, rows, size)
    if rows < DECODE_QUERY_ROWS:
        query = F.pad(query, (0, 0, 0, DECODE_QUERY_ROWS - rows))
    out = masked_attention(query, key_BGLK, value_BGLK, form, mask_BL[:, None, None, :])
    return out[:, :, :rows].reshape(batch, heads, size)


def masked_attention(
    query_nHLK: Tensor, key_nGLK: Tensor, value_nGLK: Tensor, form: AttentionForm, mask: Tensor | None
) -> Tensor:
    """Scaled dot-product attention; ``mask`` is bool, additive, or None for causal.

    Soft-capped scores take plain matrix products.
    """
    if form.softcap is not None:
        assert mask is not None
        return _softcapped(query_nHLK, key_nGLK, value_nGLK, form, mask)
    return F.scaled_dot_product_attention(
        query_nHLK,
        key_nGLK,
        value_nGLK,
        attn_mask=mask,
        dropout_p=form.dropout,
        is_causal=mask is None,
        scale=form.scale,
        enable_gqa=query_nHLK.shape[1] != key_nGLK.shape[1],
    )


def _softcapped(
    query_nHLK: Tensor, key_nGLK: Tensor, value_nGLK: Tensor, form: AttentionForm, mask: Tensor
) -> Tensor:
    assert form.softcap is not None
    repeats = query_nHLK.shape[1] // key_nGLK.shape[1]
    key = key_nGLK.repeat_interleave(repeats, dim=1)
    value = value_nGLK.repeat_interleave(repeats, dim=1)
    scores = torch.matmul(query_nHLK, key.transpose(2, 3)) * form.scale
    scores = torch.tanh(scores / form.softcap) * form.softcap
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query_nHLK.dtype)
    return torch.matmul(F.dropout(weights, form.dropout), value)
