"""Getting values off a device without making it wait.

Takes tensors on a GPU; gives copies in page-locked buffers that the writer's thread reads when they are ready.
The tensor is first copied on the device, in the program's own stream, so that later in-place writes do no harm;
the copy travels on a side stream. Statistics are reduced on the device and only their numbers travel.
"""
# pyright: standard
# (torch's own types are partial)

import functools
from collections.abc import Callable
from importlib.util import find_spec

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainfer.check.dump.records import QUANTILES, Statistics, TensorRecord
from trainfer.check.dump.tensors import flat_bytes
from trainfer.check.dump.writer import DumpWriter, WriterLimits
from trainfer.check.probe.statistics import SAMPLE, nothing_finite

PAGE_LOCKED_LIMITS = WriterLimits(chunk_bytes=16 * 2**20)
"""To lock pages for one large tensor costs more than to copy it."""


def page_locked(size: int) -> np.ndarray:
    """A buffer that a GPU can copy into while the program goes on."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


class DeferredStatistics:
    """Statistics whose numbers are still on their way."""

    def __init__(self, numbers: Tensor, count: int) -> None:
        self._numbers = numbers
        self._count = count

    def complete(self, record: TensorRecord) -> TensorRecord:
        """The record with its statistics; call it when the copies are done."""
        nan, inf, zeros, low, high, total, squares, *quantiles = self._numbers.tolist()
        finite = self._count - int(nan) - int(inf)
        if not finite:
            return msgspec.structs.replace(record, statistics=nothing_finite(self._count, int(nan), int(inf)))
        statistics = Statistics(
            count=self._count,
            nan=int(nan),
            inf=int(inf),
            zeros=int(zeros),
            min=low,
            max=high,
            mean=total / finite,
            norm=squares**0.5,
            quantiles=tuple(quantiles),
            quantile_sample=SAMPLE,
        )
        return msgspec.structs.replace(record, statistics=statistics)


class DeviceStaging:
    """Copies from devices for one writer."""

    def __init__(self, writer: DumpWriter) -> None:
        self._writer = writer
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}

    def copy(self, tensor: Tensor, room: np.ndarray) -> None:
        """Start copying a tensor's bytes into ``room``."""
        if tensor.numel():
            copied = tensor.clone(memory_format=torch.contiguous_format)
            self._start(flat_bytes(copied), torch.from_numpy(room))

    def statistics(self, tensor: Tensor) -> DeferredStatistics:
        """Reduce on the device; the numbers follow."""
        numbers = _reduce(tensor)
        target = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=tensor.device.type == "cuda")
        self._start(numbers, target)
        return DeferredStatistics(target, tensor.numel())

    def _start(self, source: Tensor, target: Tensor) -> None:
        if source.device.type != "cuda":
            target.copy_(source)
            return
        device = source.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
            self._arrived[device] = event
        source.record_stream(stream)
        self._writer.when_ready(self._wait_for_all())

    def _wait_for_all(self) -> Callable[[], None]:
        events = tuple(self._arrived.values())

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def _reduce(tensor: Tensor) -> Tensor:
    """float64 ``[7 + quantiles]``, in two kernels where Triton is there and knows the dtype."""
    if tensor.device.type == "cuda" and _has_triton():
        from trainfer.check.probe.statistics_gpu import can_reduce, numbers_of

        if can_reduce(tensor):
            return numbers_of(tensor)
    return _numbers_on_device(tensor)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _numbers_on_device(tensor: Tensor) -> Tensor:
    """float64 ``[7 + quantiles]``: nan, inf, zeros, min, max, sum, sum of squares, quantiles."""
    flat = tensor.reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.double()
    if not flat.numel():
        return torch.zeros(7 + len(QUANTILES), dtype=torch.float64, device=tensor.device)
    nan, finite = flat.isnan(), flat.isfinite()
    rest = flat.where(finite, 0)
    low, high = flat.where(finite, torch.inf).min(), flat.where(finite, -torch.inf).max()
    sample = flat[:: -(-flat.numel() // SAMPLE)]
    usable = sample.isfinite()
    ordered = sample.where(usable, torch.inf).sort().values
    places = torch.as_tensor(QUANTILES, dtype=torch.float64, device=tensor.device) * (usable.sum() - 1).clamp(
        min=0
    )
    numbers = [
        nan.sum(),
        (~finite).sum() - nan.sum(),
        (flat == 0).sum(),
        low,
        high,
        rest.sum(dtype=torch.float64),
        rest.double().square().sum(),
    ]
    return torch.cat([torch.stack([number.double() for number in numbers]), ordered[places.long()].double()])
