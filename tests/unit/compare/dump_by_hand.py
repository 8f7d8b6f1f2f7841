"""Writes small dumps by hand, so that a comparison can be given exactly what a test is about."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainfer.check.dump.digest import prefix_digests
from trainfer.check.dump.folder import claim, rank_folder, rewrite
from trainfer.check.dump.reader import ROW_TYPE
from trainfer.check.dump.records import (
    SCHEMA,
    CallRecord,
    Manifest,
    Role,
    RowCounts,
    RowLayout,
    RowsRecord,
    SequenceRecord,
    Task,
    TensorRecord,
    WeightRecord,
)
from trainfer.check.dump.tensors import DTYPE_NAMES
from trainfer.check.dump.writer import DumpWriter
from trainfer.exact.fingerprint import fingerprint


@dataclass
class Written:
    """One tensor of a call."""

    module: str
    tensor: Tensor
    role: Role = Role.OUTPUT
    name: str = "0"
    rows: bool = True


@dataclass
class SideContent:
    """What a side holds: sequences, and the tensors of calls that ran all of them, one row per token."""

    sequences: Sequence[Sequence[int]]
    tensors: Sequence[Written] = ()
    logprobs: Sequence[Sequence[float]] | None = None
    prompt_lengths: Sequence[int] | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    executed: Sequence[Sequence[int]] | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    rank: int = 0
    world_size: int = 1
    finished: bool = True
    side: str = "train"


def manifest(content: SideContent, *, finished: bool) -> Manifest:
    return Manifest(
        schema=SCHEMA, side=content.side, run_id="r", launch_id="l", rank=content.rank, world_size=content.world_size,
        ranks=None, created="2025-01-01T00:00:00Z", finished="2025-01-01T00:00:01Z" if finished else None,
        complete=finished, incomplete_reasons=(), capture={}, config={}, model_class="M",
        model_config={"hidden_size": 8, "num_attention_heads": 4}, model_dtype="F32", modules=(), versions={}, seed=None,
        counts={},
    )  # fmt: skip


def row_table(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    parts = []
    for number, sequence in enumerate(sequences):
        part = np.zeros(len(sequence), dtype=ROW_TYPE)
        part["digest"] = prefix_digests(np.array(sequence, dtype=np.int64))
        part["sequence"], part["token"] = number, sequence
        part["position"] = np.arange(len(sequence))
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=ROW_TYPE)


def put(writer: DumpWriter, number: int, item: Written, table: int) -> None:
    tensor = item.tensor.contiguous()
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    room, ref = writer.reserve(0, "forward", str(number), dtype, shape, tensor.nbytes)
    if tensor.numel():
        room[:] = tensor.reshape(-1).view(torch.uint8).numpy()
    record = TensorRecord(
        id=number, task=Task.TENSOR, step=0, pass_name="forward", call=0, module=item.module, occurrence=0, function=None,
        role=item.role, name=item.name, dtype=dtype, shape=shape, row_dims=(0,) if item.rows else (),
        table=table if item.rows else -1, device="cpu", requires_grad=False,
    )  # fmt: skip
    writer.put(0, "forward", record, ref)


def write(folder: Path, content: SideContent) -> Path:
    claim(folder, manifest(content, finished=False), leader=0)
    writer = DumpWriter(rank_folder(folder, content.rank))
    executed = content.sequences if content.executed is None else content.executed
    table = row_table(executed)
    room, ref = writer.reserve(0, "forward", "rows0", "U8", (table.nbytes,), table.nbytes)
    room[:] = table.view(np.uint8)
    rows = RowsRecord(table=0, call=0, slots=len(table), rows=len(table), blob=None)
    writer.put(0, "forward", rows, ref)
    for number, item in enumerate(content.tensors):
        put(writer, number, item, 0)
    call = CallRecord(
        call=0, step=0, pass_name="forward", weights_version=content.version, layout=RowLayout.GIVEN, slots=len(table),
        table=0, counts=RowCounts(), training=False, grad=False, autocast=None,
    )  # fmt: skip
    writer.put(0, "forward", call)
    prompts = content.prompt_lengths or [1] * len(content.sequences)
    values = content.logprobs or [
        [-1.0] * (len(s) - p) for s, p in zip(content.sequences, prompts, strict=True)
    ]
    for index, (tokens, prompt, logprobs) in enumerate(zip(content.sequences, prompts, values, strict=True)):
        record = SequenceRecord(
            index=index, tokens=tuple(tokens), prompt_length=prompt, logprobs=tuple(logprobs), sampling=content.sampling,
            weights_version=content.version, step=0, pass_name="forward",
        )  # fmt: skip
        writer.put(0, "tokens", record)
    for name, tensor in content.weights.items():
        weight = WeightRecord(
            name=name, module=name.rpartition(".")[0], role=Role.PARAMETER, dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape), fingerprint=fingerprint(tensor), weights_version=content.version, requires_grad=True,
        )  # fmt: skip
        writer.put(0, "weights", weight)
    writer.close()
    assert writer.failure is None
    if content.finished:
        rewrite(folder, manifest(content, finished=True), leader=0)
    return folder
