"""Writes which weights a side computed with: one fingerprint per parameter and buffer, or all of them.

Takes a model; gives weight records. Tied names are told; of a sharded tensor this rank's part is fingerprinted, so that
the parts of all ranks add up to the whole's, in the format that FSDP2's mixed precision computes with, not that of the
masters. Notices when an optimizer has written in place.
"""
# pyright: standard
# (distributed tensors have partial types)

import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainfer.check.dump.records import Role, WeightRecord
from trainfer.check.dump.tensors import DTYPE_NAMES
from trainfer.check.dump.writer import DumpWriter
from trainfer.check.probe.flat import FlatPiece, flat_ids, flat_pieces
from trainfer.check.probe.names import named_tensors
from trainfer.check.probe.sink import UNREADABLE, TensorSink
from trainfer.exact.fingerprint import fingerprint, fingerprint_text, partial_fingerprint


class WeightWatcher:
    """Weights of one model, written once per version."""

    def __init__(self, model: nn.Module, writer: DumpWriter, sink: TensorSink, *, full: bool) -> None:
        self._model = model
        self._writer = writer
        self._sink = sink
        self._full = full
        self._written_at: int | None = None

    def changed(self) -> bool:
        """True where some parameter was written in place since the last ``write``."""
        return self._written_at is not None and self._counters() != self._written_at

    def write(self, *, step: int, version: int) -> None:
        """Write a record for every parameter and buffer, tied ones under each name."""
        self._written_at = self._counters()
        names = named_tensors(self._model)
        first_names: dict[int, str] = {}
        formats = computed_formats(self._model)
        flat = flat_ids(self._model)
        for name, tensor in [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]:
            if id(tensor) in flat:
                continue
            module, local = names[name]
            full_name = f"{module}.{local}" if module else local
            tied_to = first_names.get(id(tensor))
            first_names.setdefault(id(tensor), full_name)
            used = formats.get(id(tensor))
            self._write_one(full_name, module, tensor, tied_to, step=step, version=version, used=used)
        if flat:
            self._write_flat(step=step, version=version)
        self._writer.flush()

    def _write_flat(self, *, step: int, version: int) -> None:
        """What FSDP1 keeps in flat parameters, each under its own name; by fingerprint alone."""
        if self._full:
            self._sink.problem("parameters inside FSDP1 are written by their fingerprints alone")
        known: dict[str, FlatPiece] = {}
        for piece in flat_pieces(self._model):
            known[piece.name] = piece
            source = known.get(piece.tied_to or "", piece)
            record = WeightRecord(
                name=piece.name,
                module=piece.name.rpartition(".")[0],
                role=Role.PARAMETER,
                dtype=DTYPE_NAMES.get(piece.dtype, "unknown"),
                shape=piece.shape,
                fingerprint=source.fingerprint,
                weights_version=version,
                requires_grad=piece.requires_grad,
                tied_to=piece.tied_to,
                parts=source.parts,
            )
            self._writer.put(step, "weights", record)

    def _write_one(
        self,
        name: str,
        module: str,
        tensor: Tensor,
        tied_to: str | None,
        *,
        step: int,
        version: int,
        used: torch.dtype | None,
    ) -> None:
        format_used = used or tensor.dtype
        dtype = DTYPE_NAMES.get(format_used)
        if dtype is None or tensor.is_meta:
            self._sink.problem(f"{name} ({tensor.dtype}) has no fingerprint", module=module)
            return
        try:
            part, parts, text = part_fingerprint(tensor.detach().to(format_used))
        except UNREADABLE as error:
            self._sink.problem(f"{name} has no fingerprint: {error}", module=module)
            return
        record = WeightRecord(
            name=name,
            module=module,
            role=Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.BUFFER,
            dtype=dtype,
            shape=tuple(tensor.shape),
            fingerprint=text,
            weights_version=version,
            requires_grad=tensor.requires_grad,
            tied_to=tied_to,
            parts=parts,
        )
        ref = None
        if self._full and tied_to is None:
            ref = self._sink.write_bytes(step, "weights", f"weight.{version}.{name}", dtype, part)
        self._writer.put(step, "weights", record, ref)

    def _counters(self) -> int:
        return sum(_local(parameter)._version for parameter in self._model.parameters())


def computed_formats(model: nn.Module) -> dict[int, torch.dtype]:
    """By id, the format in which FSDP2's mixed precision gathers a parameter, where it is not the stored one."""
    formats: dict[int, torch.dtype] = {}
    for module in model.modules():  # a module before those inside it, whose own policy then counts
        if isinstance(module, FSDPModule):
            wanted = module._get_fsdp_state()._mp_policy.param_dtype
            for parameter in module.parameters():
                formats.pop(id(parameter), None)
                if wanted is not None and parameter.is_floating_point():
                    formats[id(parameter)] = wanted
    return formats


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_fingerprint(tensor: Tensor) -> tuple[Tensor, tuple[tuple[int, int, int], ...], str]:
    """This rank's part, where it lies, and its fingerprint."""
    if not isinstance(tensor, DTensor):
        return tensor, (), fingerprint(tensor)
    part = tensor.to_local()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or []
    parts = tuple(
        (placement.dim, coordinate[axis], mesh.size(axis))
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard) and mesh.size(axis) > 1
    )
    if not parts:
        return part, (), fingerprint(part)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    sums = _partial_sums(part, tuple(tensor.shape), tuple(offset), 0)
    return part, parts, fingerprint_text(part.dtype, part.numel(), sums)


def _partial_sums(part: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], start: int) -> Tensor:
    """Sums of a block that begins at ``offset`` of a whole of this shape, whose element 0 is number ``start``."""
    inner = math.prod(shape[1:])
    if tuple(part.shape[1:]) == shape[1:]:
        return partial_fingerprint(part, start + offset[0] * inner)
    total = torch.zeros(2, dtype=torch.int64, device=part.device)
    for index in range(part.shape[0]):
        total += _partial_sums(part[index], shape[1:], offset[1:], start + (offset[0] + index) * inner)
    return total
