"""A point's rows as one tensor: reads records and does what ``align`` described.

Takes a source (records, columns, operation); gives ``[slots, width]``. Nothing is compared here.
"""

import torch
from torch import Tensor

from trainfer.check.align.points import Columns, Op, Source
from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import SKETCH_WIDTH, Task
from trainfer.check.dump.tensors import rows_first


def source_rows(side: ReadableSide, source: Source) -> Tensor:
    """All slots of a source, ``[slots, width]``; rows follow the slots of its table.

    Raises:
        DamagedRecordError: a record's bytes are not whole, or its shape is not what its rows need.
    """
    parts: list[Tensor] = []
    for place in range(len(source.records)):
        rows = _record_rows(side, source, place)
        if source.columns:
            rows = take_columns(rows, source.columns[place])
        parts.append(rows)
    match source.op:
        case Op.SINGLE:
            return parts[0]
        case Op.SUM:
            return _sum(parts)
        case Op.CONCAT:
            return torch.cat(parts, dim=1)
        case Op.ROTATE:
            return _rotate(*parts)


def _record_rows(side: ReadableSide, source: Source, place: int) -> Tensor:
    record = source.records[place]
    tensor = side.load(source.ranks[place] if source.ranks else source.rank, record)
    if record.task is Task.SKETCH:
        return tensor[:, :SKETCH_WIDTH]
    if record.row_dims:
        if max(record.row_dims) >= tensor.dim():
            raise DamagedRecordError(
                f"{record.module}: rows over dimensions {record.row_dims} of {record.shape}"
            )
        rows = rows_first(tensor, record.row_dims)
    else:
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        if tensor.dim() == 2 and tensor.shape[0] == 1 and source.slots % max(tensor.shape[1], 1) == 0:
            rows = tensor.reshape(-1, 1)
    if source.slots and len(rows) and len(rows) != source.slots and source.slots % len(rows) == 0:
        rows = rows.repeat(source.slots // len(rows), 1)
    return rows


def take_columns(rows: Tensor, columns: Columns) -> Tensor:
    """The named ranges of every row, in order."""
    if not columns:
        return rows
    if columns[-1][1] > rows.shape[1]:
        raise DamagedRecordError(f"columns up to {columns[-1][1]} of rows with {rows.shape[1]} features")
    if len(columns) == 1:
        return rows[:, columns[0][0] : columns[0][1]]
    index = torch.cat([torch.arange(start, stop) for start, stop in columns])
    return rows.index_select(1, index)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        if part.shape != total.shape:
            raise DamagedRecordError(f"a residual of shape {tuple(part.shape)} beside {tuple(total.shape)}")
        total = total + part
    return total


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Transformers' half-split order, computed in the states' dtype as it does."""
    width = cos.shape[1]
    if width == 0 or states.shape[1] % width:
        raise DamagedRecordError(f"rows of {states.shape[1]} features cannot be turned by tables of {width}")
    heads = states.reshape(len(states), -1, width)
    half = width // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return (heads * cos[:, None] + turned * sin[:, None]).reshape(len(states), -1)
