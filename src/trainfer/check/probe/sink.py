"""Turns tensors that hooks see into records of the dump.

Takes a tensor and its place; gives a record to the writer, and the bytes, statistics or sketch that belong to it.
An identical storage is treated once: the output of one module that is the input of the next costs a look-up.
Everything is read or copied before the hook returns, so later in-place writes do no harm.
"""
# pyright: standard
# (torch's own types are partial, and storages have no public identity)

import threading
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from trainfer.check.dump.checksum import checksum
from trainfer.check.dump.records import NO_CALL, ProblemRecord, Statistics, Task, TensorRecord
from trainfer.check.dump.tensors import DTYPE_NAMES, flat_bytes, rows_first
from trainfer.check.dump.writer import BlobRef, DumpWriter
from trainfer.check.probe.call import NO_ROWS, ForwardCall, Place, RowView
from trainfer.check.probe.settings import CaptureSettings
from trainfer.check.probe.sketch import sketch_rows
from trainfer.check.probe.staging import DeferredStatistics, DeviceStaging
from trainfer.check.probe.statistics import StatisticsTaker

UNREADABLE = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)
"""What torch raises for a tensor that cannot be read (sparse, nested, meta, quantised, fake)."""


class CaptureWarning(UserWarning):
    """Something was not captured; training goes on."""


class _Seen(NamedTuple):
    alive: StorageWeakRef
    version: int | str
    kept: BlobRef | Statistics | DeferredStatistics
    shape: tuple[int, ...]


class TensorSink:
    """Where the hooks of one capture deliver; safe to call from autograd's threads."""

    def __init__(self, writer: DumpWriter, settings: CaptureSettings) -> None:
        self._writer = writer
        self._settings = settings
        self._lock = threading.RLock()
        self._seen: dict[object, _Seen] = {}
        self._task = settings.task
        self._has_limit = settings.max_bytes is not None
        self._hide_from_modes = settings.level.functions
        self._next_id = 0
        self._next_table = 0
        self._statistics = StatisticsTaker()
        self._staging = DeviceStaging(writer)
        self._device_names: dict[torch.device, str] = {}
        self._warned: set[str] = set()
        self.reasons: list[str] = []
        """Why the dump is incomplete; empty where it is whole."""
        self.deduplicated = 0
        self.without_rows = 0

    @property
    def num_records(self) -> int:
        """Tensor records so far."""
        return self._next_id

    def take_table(self) -> int:
        """A fresh row table number."""
        self._next_table += 1
        return self._next_table - 1

    def record(self, call: ForwardCall, place: Place, tensor: Tensor, *, head: bool = False) -> None:
        """Record a tensor; what cannot be read becomes a problem of the dump, not of the program."""
        with self._lock:
            try:
                if self._hide_from_modes:
                    with torch._C.DisableTorchFunction():
                        self._record(call, place, tensor, head=head)
                else:
                    self._record(call, place, tensor, head=head)
            except UNREADABLE as error:
                self.problem(
                    f"{place.role.value} {place.name}: {error}", module=place.module, call=call.number
                )

    def problem(self, message: str, *, module: str = "", call: int = NO_CALL) -> None:
        """Note something that was not captured: in the index, in the manifest, and once as a warning."""
        with self._lock:
            message = message.splitlines()[0][:500] if message else "unknown"
            self._writer.put(0, "problems", ProblemRecord(message=message, module=module, call=call))
            self.incomplete(f"{module or 'the model'}: {message}")

    def incomplete(self, reason: str) -> None:
        """Mark the dump incomplete and warn, once per reason."""
        if reason in self._warned or len(self._warned) > 100:
            return
        self._warned.add(reason)
        self.reasons.append(reason)
        warnings.warn(f"capture is incomplete: {reason}", CaptureWarning, stacklevel=2)

    def end_call(self) -> None:
        """Forget storages that are gone, hand over what waits, notice a disk that refused."""
        with self._lock:
            self._seen = {key: seen for key, seen in self._seen.items() if not seen.alive.expired()}
            self._writer.flush_soon()
            self.notice_failure()

    def end_backward(self) -> None:
        """Hand over what waits: gradients come after their call."""
        with self._lock:
            self._writer.flush_soon()

    def notice_failure(self) -> None:
        """Warn about what the writer's thread could not write."""
        if self._writer.failure is not None:
            self.incomplete(self._writer.failure)

    def _full(self) -> bool:
        limit = self._settings.max_bytes
        if limit is None or self._writer.bytes_taken < limit:
            return self._writer.failure is not None
        self.incomplete(f"max_bytes={limit} is used up; what follows was not dumped")
        return True

    def _record(self, call: ForwardCall, place: Place, tensor: Tensor, *, head: bool) -> None:
        """No operation here is seen by autograd (all are on detached tensors) or changed by autocast."""
        requires_grad, parts = tensor.requires_grad, ()
        if isinstance(tensor, DTensor):
            tensor, parts = _local(tensor)
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided:
            raise TypeError(f"{tensor.dtype} {tensor.layout} tensors are not captured")
        if (self._has_limit or self._writer.failure is not None) and self._full():
            return
        shape = tensor.shape
        view = NO_ROWS if parts else call.row_view(shape, head=head)
        task = self._task
        if not view.row_dims:
            self.without_rows += 1
            if self._settings.filters_rows:
                return
            task = Task.STATISTICS if task is Task.SKETCH else task
        storage, on_cpu = tensor.untyped_storage(), tensor.is_cpu
        key, version = _key(tensor, storage, view), _version(tensor)
        seen = self._seen.get(key)
        if seen is not None and seen.version == version and version != _UNVERSIONED:
            self.deduplicated += 1
            kept, shape = seen.kept, seen.shape if view.expand or view.keep is not None else shape
        else:
            if on_cpu and task is Task.STATISTICS and view.keep is None:
                kept = self._statistics.take(tensor)
            else:
                kept, shape = self._keep(call, task, dtype, tensor.detach(), view)
            self._seen[key] = _Seen(StorageWeakRef(storage), version, kept, shape)
        record = TensorRecord(
            id=self._next_id,
            task=task,
            step=call.step,
            pass_name=call.pass_name,
            call=call.number,
            module=place.module,
            occurrence=place.occurrence,
            function=place.function,
            role=place.role,
            name=place.name,
            dtype=dtype,
            shape=shape,
            row_dims=(0,) if view.keep is not None else view.row_dims,
            table=view.table,
            device="cpu" if on_cpu else self._device_name(tensor.device),
            requires_grad=requires_grad,
            parts=parts,
            statistics=kept if isinstance(kept, Statistics) else None,
        )
        self._next_id += 1
        if isinstance(kept, DeferredStatistics):
            self._writer.put_later(call.step, call.pass_name, lambda: kept.complete(record))
        else:
            self._writer.put(call.step, call.pass_name, record, kept if isinstance(kept, BlobRef) else None)

    def _keep(
        self, call: ForwardCall, task: Task, dtype: str, tensor: Tensor, view: RowView
    ) -> tuple[BlobRef | Statistics | DeferredStatistics, tuple[int, ...]]:
        """Take what the task wants of a tensor's values, now; and the shape of what was taken."""
        if view.keep is not None or (view.expand and task is not Task.STATISTICS):
            tensor = _select(tensor, view)
            view = RowView((0,) if view.keep is not None else view.row_dims, view.table)
        shape = tuple(tensor.shape)
        if task is Task.STATISTICS:
            return self._statistics.take(tensor) if tensor.is_cpu else self._staging.statistics(tensor), shape
        if task is Task.SKETCH:
            tensor, dtype = sketch_rows(rows_first(tensor, view.row_dims)), "F32"
        return self.write_bytes(call.step, call.pass_name, str(self._next_id), dtype, tensor), shape

    def _device_name(self, device: torch.device) -> str:
        name = self._device_names.get(device)
        if name is None:
            name = self._device_names[device] = str(device)
        return name

    def write_bytes(self, step: int, pass_name: str, name: str, dtype: str, tensor: Tensor) -> BlobRef:
        """Copy a tensor's bytes to the writer under a name of its shard."""
        with self._lock:
            room, ref = self._writer.reserve(step, pass_name, name, dtype, tuple(tensor.shape), tensor.nbytes)
            if tensor.device.type != "cpu":
                self._staging.copy(tensor, room)
            elif tensor.numel():
                room[:] = flat_bytes(tensor).numpy()
            return ref


def _local(tensor: DTensor) -> tuple[Tensor, tuple[tuple[int, int, int], ...]]:
    """This rank's part, with (dimension, part, parts) for each cut."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    cuts = [
        (placement.dim, coordinate[axis], mesh.size(axis))
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard)
    ]
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError("a distributed tensor that still has to be summed over ranks is not captured")
    return tensor.to_local().detach(), tuple(cut for cut in cuts if cut[2] > 1)


def _key(tensor: Tensor, storage: torch.UntypedStorage, view: RowView) -> tuple[object, ...]:
    """Equal for tensors that show the same elements of the same storage in the same order."""
    start = tensor.storage_offset()
    rows = None if view.keep is None and not view.expand else (view.row_dims, view.table)
    if tensor.is_contiguous():
        return (storage._cdata, start, tensor.numel(), tensor.dtype, rows)
    return (storage._cdata, start, tensor.shape, tensor.stride(), tensor.dtype, rows)


_UNVERSIONED = "unversioned"


def _version(tensor: Tensor) -> int | str:
    """Changes with every in-place write; inference tensors have no counter, so their bytes are looked at."""
    if not tensor.is_inference():
        return tensor._version
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        return checksum(flat_bytes(tensor).numpy())
    return _UNVERSIONED


def _select(tensor: Tensor, view: RowView) -> Tensor:
    """Serve every batch entry where one stands for all, and keep the rows that a filter wants: ``[rows, ...]``."""
    if view.expand:
        tensor = tensor.expand(view.batch, *tensor.shape[1:])
    if view.keep is None:
        return tensor
    others = [dim for dim in range(tensor.dim()) if dim not in view.row_dims]
    rows = tensor.permute(*view.row_dims, *others).flatten(0, len(view.row_dims) - 1)
    return rows.index_select(0, torch.as_tensor(view.keep, device=tensor.device))
