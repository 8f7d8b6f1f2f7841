"""One tensor as msProbe's JSON leaf, and its file.

Takes values, or the statistics that stand for them; gives ``{"type": "torch.Tensor", "Max": ...}`` and saves
``NAME.pt`` where values are wanted. Statistics are float32 or better whatever the tensor's dtype.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainfer.check.dump.records import Statistics
from trainfer.check.dump.tensors import flat_bytes
from trainfer.check.probe.statistics import StatisticsTaker
from trainfer.integrations.msprobe.options import Slice

TENSOR_FOLDER = "dump_tensor_data"
_TAKER = StatisticsTaker()
_NAN, _INFINITE = float("nan"), float("inf")

Leaf = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What is kept of a tensor beside its statistics."""

    values: bool
    checksum: bool = False
    slices: Sequence[Slice] = ()


def tensor_leaf(tensor: Tensor, file: str, folder: Path, keep: Keep, *, requires_grad: bool) -> Leaf:
    """The leaf of a tensor; saves it as ``folder/dump_tensor_data/{file}.pt`` where its values are kept.

    Raises:
        OSError: the file cannot be written.
    """
    tensor = sliced(tensor.detach(), keep.slices).cpu()
    leaf = statistics_leaf(
        _TAKER.take(tensor),
        str(tensor.dtype),
        tuple(tensor.shape),
        requires_grad=requires_grad,
        is_number=tensor.is_floating_point() or tensor.is_complex(),
    )
    if keep.checksum:
        leaf["md5"] = f"{zlib.crc32(flat_bytes(tensor).numpy().tobytes()):08x}"
    if keep.values:
        leaf["data_name"] = f"{file}.pt"
        target = folder / TENSOR_FOLDER / f"{file}.pt"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # clone: a view would take its whole storage along
            torch.save(tensor.clone(), target)
        except RuntimeError as error:  # how torch tells a full disk
            raise OSError(str(error).splitlines()[0]) from error
    return leaf


def statistics_leaf(
    found: Statistics | None, dtype: str, shape: tuple[int, ...], *, requires_grad: bool, is_number: bool
) -> Leaf:
    """The leaf of a tensor that only its statistics are known of; null where msProbe has null."""
    numbers: dict[str, float | None] = dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    if found is not None and found.count:
        numbers = {"Max": found.max, "Min": found.min, "Mean": found.mean, "Norm": found.norm}
        if found.nan:
            numbers = dict.fromkeys(numbers, _NAN)
        elif found.inf:
            numbers |= {"Mean": _NAN, "Norm": _INFINITE}
        if not is_number:
            numbers |= {"Mean": None, "Norm": None}
    return {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": list(shape),
        **numbers,
        "requires_grad": requires_grad,
    }


def sliced(tensor: Tensor, slices: Sequence[Slice]) -> Tensor:
    """The wanted part of a tensor; each slice applies where the dimension has the size that it names."""
    for cut in slices:
        if -tensor.dim() <= cut.dim < tensor.dim() and tensor.shape[cut.dim] == cut.size:
            tensor = tensor.narrow(cut.dim, cut.begin, cut.end - cut.begin)
    return tensor


def scalar_leaf(value: object) -> tuple[bool, Leaf | None]:
    """(is one, leaf) of an argument that is no tensor: a number, a text, a dtype, or None."""
    if value is None:
        return True, None
    if isinstance(value, bool | int | float | str):
        return True, {"type": type(value).__name__, "value": value}
    if isinstance(value, torch.dtype):
        return True, {"type": "torch.dtype", "value": str(value)}
    if isinstance(value, torch.Size):
        return True, {"type": "torch.Size", "value": list(value)}
    if isinstance(value, slice):
        return True, {"type": "slice", "value": [value.start, value.stop, value.step]}
    return False, None
