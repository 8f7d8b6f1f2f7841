"""Blobs as torch tensors; the only place where the dump's dtype names meet torch's.

Takes verified bytes, gives CPU tensors that share them; takes tensors, gives their bytes.
"""

import torch
from torch import Tensor

from trainfer.check.dump.reader import DamagedRecordError, Dump
from trainfer.check.dump.records import SKETCH_WIDTH, Task, TensorRecord, WeightRecord

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load_tensor(dump: Dump, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
    """The tensor of a record; a sketch as ``[rows, SKETCH_WIDTH + 1]``.

    Raises:
        DamagedRecordError: its bytes are not whole, or the record holds none (statistics, fingerprints).
    """
    if record.blob is None:
        raise DamagedRecordError(f"{record.module}.{record.name} was captured without its values")
    dtype, shape = DTYPES.get(record.dtype), record.shape
    if isinstance(record, TensorRecord) and record.task is Task.SKETCH:
        width = SKETCH_WIDTH + 1
        dtype, shape = torch.float32, (record.blob.nbytes // (4 * width), width)
    if dtype is None:
        raise DamagedRecordError(f"{record.module}.{record.name} has the unknown dtype {record.dtype!r}")
    count = 1
    for size in shape:
        count *= size
    if min(shape, default=0) < 0 or count * dtype.itemsize != record.blob.nbytes:
        raise DamagedRecordError(
            f"{record.module}.{record.name}: {record.blob.nbytes} bytes are not {record.dtype} {shape}"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(dump.read(rank, record.blob), dtype=dtype).reshape(shape)


def rows_first(tensor: Tensor, row_dims: tuple[int, ...]) -> Tensor:
    """``[slots, features]`` view or copy: the row dimensions flattened to the front, the others behind.

    Example: ``[2, 8, 5, 16]`` with row dims (0, 2) gives ``[10, 128]``.
    """
    others = [dim for dim in range(tensor.dim()) if dim not in row_dims]
    slots = 1
    for dim in row_dims:
        slots *= tensor.shape[dim]
    return tensor.permute(*row_dims, *others).reshape(slots, -1)


def flat_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor in row-major order, ``uint8 [nbytes]``; copied only where memory is not in that order.

    Strides of dimensions of size 1 are free to be anything, also in what torch calls contiguous; they are not kept.
    """
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
