"""Bit-exact fingerprints of tensors that can be summed over shards.

Takes a tensor of any dtype and device; gives text such as ``"float32:4096:0f3a…"`` (dtype, number of
elements, 32 hex digits). Two sums mod 2^64, ``F = sum_i mix(i) * bits_i``, with different odd weights:
one changed element always changes both sums (odd numbers are invertible mod 2^64), and swapped elements
do unless their weights agree in both. Not cryptographic: it catches mistakes, not forgers.

The sums are additive over index ranges: shards that know where they start are summed by one all-reduce of
two int64. The tensor is read in pieces; at most ``_PIECE`` of its elements are ever copied. Shape is left out.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from trainfer.exact import gpu

_COLUMNS = 1 << 14
"""Elements whose weights are tabulated; element i weighs ``table[i % _COLUMNS] * row_weight(i // _COLUMNS)``."""
_PIECE = 1 << 17
"""Elements handled at a time: 1 MiB of int64, which stays in cache."""
_MASK = (1 << 64) - 1
_WAITING_BYTES = 1 << 30
"""Tensors on a CUDA device that are held until they are read together: the caller may have made them for this."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> str:
    """Fingerprint of a whole tensor, elements in row-major order."""
    return fingerprint_text(tensor.dtype, tensor.numel(), partial_fingerprint(tensor, 0))


def fingerprints(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Fingerprint of each whole tensor, by name; those on a CUDA device are read many at a time."""
    found: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    waiting_bytes = 0
    for name, tensor in named_tensors:
        dense = tensor.detach()
        if (
            dense.device.type != "cuda"
            or dense.is_complex()
            or not dense.is_contiguous()
            or not gpu.has_kernels()
        ):
            found[name] = fingerprint(tensor)
            continue
        found[name] = ""  # keeps the order of the names
        waiting[name] = dense.reshape(-1)
        waiting_bytes += dense.numel() * dense.element_size()
        if waiting_bytes > _WAITING_BYTES:
            found |= _read_many(waiting)
            waiting, waiting_bytes = {}, 0
    return found | _read_many(waiting)


def _read_many(tensors: dict[str, Tensor]) -> dict[str, str]:
    if not tensors:
        return {}
    bits = [tensor.view(_BITS[tensor.element_size()]) for tensor in tensors.values()]
    device = bits[0].device
    rows = max(1, -(-max(item.numel() for item in bits) // _COLUMNS))
    sums_N2 = gpu.fingerprint_many(bits, _column_weights(device), _row_table(rows, device))
    return {
        name: fingerprint_text(tensor.dtype, tensor.numel(), sums)
        for (name, tensor), sums in zip(tensors.items(), sums_N2.cpu(), strict=True)
    }


def fingerprint_text(dtype: torch.dtype, num_elements: int, sums: Tensor) -> str:
    """The text of added-up ``partial_fingerprint`` sums of a tensor with this dtype and size."""
    digits = "".join(f"{int(value) & _MASK:016x}" for value in sums.tolist())
    return f"{str(dtype).removeprefix('torch.')}:{num_elements}:{digits}"


def partial_fingerprint(tensor: Tensor, start_index: int) -> Tensor:
    """The two sums of a shard whose first element is element ``start_index`` of the whole.

    Returns:
        int64 ``[2]`` on the tensor's device; add those of all shards (wrapping) for the whole's sums.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        return partial_fingerprint(torch.view_as_real(tensor.resolve_conj()), 2 * start_index)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    if tensor.is_contiguous():
        return total + _flat_sums(tensor.reshape(-1), start_index)
    if tensor.numel() <= _PIECE or tensor.dim() == 1:
        for begin in range(0, tensor.numel() if tensor.dim() == 1 else 1, _PIECE):
            piece = tensor[begin : begin + _PIECE] if tensor.dim() == 1 else tensor
            total += _flat_sums(piece.contiguous().reshape(-1), start_index + begin)
        return total
    per_slice = tensor[0].numel()
    for index in range(tensor.shape[0]):
        total += partial_fingerprint(tensor[index], start_index + index * per_slice)
    return total


def _flat_sums(flat: Tensor, start_index: int) -> Tensor:
    bits = flat.view(_BITS[flat.element_size()])
    table = _column_weights(flat.device)
    if flat.device.type == "cuda" and gpu.has_kernels():
        first, last = start_index // _COLUMNS, (start_index + bits.numel() - 1) // _COLUMNS
        return gpu.fingerprint_sums(
            bits, table, _row_table(last + 1, flat.device)[:, first:], start_index % _COLUMNS
        )
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    position, end = 0, bits.numel()
    while position < end:
        row, column = divmod(start_index + position, _COLUMNS)
        whole_rows = min(end - position, _PIECE) // _COLUMNS if column == 0 else 0
        if whole_rows:
            count = whole_rows * _COLUMNS
            piece = bits[position : position + count].view(whole_rows, _COLUMNS).to(torch.int64)
            weights = _row_weights(row, whole_rows, flat.device)
            sums = torch.stack([(piece * table[mix]).sum(dim=1) for mix in range(2)])
            total += (sums * weights).sum(dim=1)
        else:
            count = min(end - position, _COLUMNS - column)
            piece = bits[position : position + count].to(torch.int64)
            weights = _row_weights(row, 1, flat.device)
            total += (piece * table[:, column : column + count]).sum(dim=1) * weights[:, 0]
        position += count
    return total


@functools.lru_cache(maxsize=16)
def _column_weights(device: torch.device) -> Tensor:
    rows = [[_odd(mix, index) for index in range(_COLUMNS)] for mix in (1, 2)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=4096)
def _row_weights(first: int, count: int, device: torch.device) -> Tensor:
    rows = [[_odd(mix, index) for index in range(first, first + count)] for mix in (3, 4)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _row_table(count: int, device: torch.device) -> Tensor:
    """Row weights from row 0, at least ``count``: tables double, so that few are made."""
    return _row_weights(0, max(1024, 1 << (count - 1).bit_length()), device)


def _odd(mix: int, index: int) -> int:
    """An odd signed 64-bit number from splitmix64 (Steele, Lea, Flood 2014) of ``index`` in stream ``mix``."""
    value = (index + 1) * 0x9E3779B97F4A7C15 + mix * 0xD1342543DE82EF95 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    value = (value ^ value >> 31) | 1
    return value - (1 << 64) if value >> 63 else value
