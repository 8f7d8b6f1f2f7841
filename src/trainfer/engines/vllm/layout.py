"""Where each Transformers tensor is inside vLLM's model: module, rows, shard.

Takes a loaded vLLM model; gives one ``Source`` per Transformers tensor and worker. Knows vLLM's linear and
vocabulary layers and what they fuse (q, k, v; gate, up); every other parameter is whole and has its own name.
A parameter that Transformers names differently comes out under vLLM's name, and the proof then says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import (  # pyright: ignore[reportMissingImports]
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
    VocabParallelEmbedding,
)

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Transformers' modules, in the order of their rows. A fused module with another name is fused there, too."""
TRANSPOSED = {"GPT2LMHeadModel": ("c_attn", "c_proj", "c_fc")}
"""Modules whose weight Transformers holds as ``[inputs, outputs]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One tensor, or this worker's part of it."""

    name: str
    """In Transformers."""
    module: nn.Module
    attribute: str
    rows: tuple[int, int]
    """In the tensor of this worker."""
    shape: tuple[int, ...]
    """Of the whole tensor, in Transformers' orientation."""
    region: tuple[int, int, int, int]
    """See ``pieces.Piece``."""
    transposed: bool


def sources(model: nn.Module) -> list[Source]:
    """Every parameter of the model; those of one module stand together."""
    transposed = TRANSPOSED.get(type(model).__name__, ())
    found: list[Source] = []
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            is_transposed = name.rpartition(".")[2] in transposed
            found.extend(_of_linear(name, module, is_transposed=is_transposed))
        elif isinstance(module, VocabParallelEmbedding):
            found.extend(_of_vocabulary(name, module))
        else:
            found.extend(_whole(name, module))
    return found


def is_head(module: nn.Module) -> bool:
    """True for the layer that gives the logits."""
    return isinstance(module, ParallelLMHead)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Rows of a linear that belong together. Example: k of 2 heads of 16, one head on each of 2 workers, on
    worker 1: ``_Block(local=16, total=32, first=16)``.
    """

    local: int
    """Rows on this worker."""
    total: int
    first: int
    """The first of them among all."""


def _blocks(module: Any) -> list[_Block]:
    if isinstance(module, QKVParallelLinear):
        rank, copies = module.tp_rank, module.num_kv_head_replicas
        value_size = vars(module).get("v_head_size", module.head_size)  # vLLM 0.11 has no other one
        query, key, value = (
            (module.num_heads, module.head_size, module.total_num_heads, rank),
            (module.num_kv_heads, module.head_size, module.total_num_kv_heads, rank // copies),
            (module.num_kv_heads, value_size, module.total_num_kv_heads, rank // copies),
        )
        return [
            _Block(local=heads * size, total=total * size, first=place * heads * size)
            for heads, size, total, place in (query, key, value)
        ]
    if isinstance(module, MergedColumnParallelLinear):
        shares = [size // module.tp_size for size in module.output_sizes]
        return [
            _Block(local=share, total=share * module.tp_size, first=share * module.tp_rank)
            for share in shares
        ]
    if isinstance(module, ColumnParallelLinear):
        share = module.output_size_per_partition
        return [_Block(local=share, total=module.output_size, first=share * module.tp_rank)]
    assert isinstance(module, LinearBase)
    return [_Block(local=module.output_size, total=module.output_size, first=0)]


def _of_linear(name: str, module: Any, *, is_transposed: bool) -> Iterator[Source]:
    prefix, _, leaf = name.rpartition(".")
    blocks = _blocks(module)
    separate = leaf in FUSED and len(FUSED[leaf]) == len(blocks)
    names = [f"{prefix}.{part}" for part in FUSED[leaf]] if separate else [name] * len(blocks)
    totals = [b.total for b in blocks] if separate else [sum(b.total for b in blocks)] * len(blocks)
    left, right = 0, module.input_size
    if isinstance(module, RowParallelLinear):
        share = module.input_size_per_partition
        left, right = share * module.tp_rank, share * (module.tp_rank + 1)
    for attribute in ("weight", "bias") if module.bias is not None else ("weight",):
        row = base = 0
        width = (left, right) if attribute == "weight" else (0, 1)
        for block, own_name, total in zip(blocks, names, totals, strict=True):
            first = block.first + (0 if separate else base)
            shape = (total, module.input_size) if attribute == "weight" else (total,)
            yield Source(
                name=f"{own_name}.{attribute}",
                module=module,
                attribute=attribute,
                rows=(row, row + block.local),
                shape=shape[::-1] if is_transposed else shape,
                region=(first, first + block.local, width[0], width[1]),
                transposed=is_transposed and attribute == "weight",
            )
            row, base = row + block.local, base + block.total


def _of_vocabulary(name: str, module: Any) -> Iterator[Source]:
    """Rows of the model's own vocabulary; what vLLM pads it with never reaches a logit that is used."""
    shard = module.shard_indices
    first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    columns = {"weight": module.embedding_dim}
    for attribute, _ in module.named_parameters(recurse=False):
        width = columns.get(attribute)
        total = module.org_vocab_size
        yield Source(
            name=f"{name}.{attribute}",
            module=module,
            attribute=attribute,
            rows=(0, end - first),
            shape=(total,) if width is None else (total, width),
            region=(first, end, 0, width or 1),
            transposed=False,
        )


def _whole(name: str, module: nn.Module) -> Iterator[Source]:
    for attribute, value in module.named_parameters(recurse=False):
        rows = value.shape[0] if value.dim() else 1
        yield Source(
            name=f"{name}.{attribute}" if name else attribute,
            module=module,
            attribute=attribute,
            rows=(0, rows),
            shape=tuple(value.shape),
            region=(0, rows, 0, value.numel() // rows if rows else 0),
            transposed=False,
        )
