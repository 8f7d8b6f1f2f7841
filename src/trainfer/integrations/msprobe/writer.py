"""Writes msProbe's format from any side, so that its tools read what trainfer captured.

Takes a side and a folder; gives ``step{N}/rank{R}`` with ``dump.json``, ``construct.json``, ``stack.json`` and, where
values were captured, ``dump_tensor_data/*.pt``. A module's calls are numbered in the order of execution, as msProbe
does. Rows, sequences and log-probs have no place in that format and are left out.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import Role, Task, TensorRecord
from trainfer.errors import DumpError
from trainfer.integrations.msprobe.names import TORCH_DTYPES

_PLACES = {
    Role.INPUT: ("forward", "input"),
    Role.OUTPUT: ("forward", "output"),
    Role.OUTPUT_GRADIENT: ("backward", "input"),
    Role.INPUT_GRADIENT: ("backward", "output"),
}


def write_msprobe(side: ReadableSide, folder: Path) -> Path:
    """Write one side in msProbe's format; gives the folder.

    Raises:
        DumpError: the folder is in use or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DumpError(
            f"{folder} is not empty; msProbe's files would mix with what is there. Name another folder"
        )
    kinds = {entry.name: entry.kind for entry in side.manifest.modules}
    for rank in side.ranks:
        steps: dict[int, list[TensorRecord]] = defaultdict(list)
        for record in side.tensors(rank):
            steps[record.step].append(record)
        for step, records in steps.items():
            _RankWriter(side, rank, kinds, folder / f"step{step}" / f"rank{rank}").write(records)
    return folder


class _RankWriter:
    """One step of one rank."""

    def __init__(self, side: ReadableSide, rank: int, kinds: dict[str, str], folder: Path) -> None:
        self._side, self._rank, self._kinds = side, rank, kinds
        self._folder = folder
        self._values = folder / "dump_tensor_data"
        self._data: dict[str, dict[str, object]] = {}
        self._calls: dict[tuple[str, str, str], dict[tuple[int, int], int]] = defaultdict(dict)
        self._keeps_values = False

    def write(self, records: list[TensorRecord]) -> None:
        try:
            self._values.mkdir(parents=True)
            for record in records:
                self._add(record)
            task = "tensor" if self._keeps_values else "statistics"
            head = {
                "task": task,
                "level": "L0",
                "framework": "pytorch",
                "dump_data_dir": "dump_tensor_data" if self._keeps_values else None,
                "data": self._data,
            }
            self._put("dump.json", head)
            self._put("construct.json", self._construct())
            self._put("stack.json", {})
        except OSError as error:
            raise DumpError(f"{self._folder} cannot be written: {error.strerror}") from error

    def _put(self, name: str, value: object) -> None:
        (self._folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")

    def _add(self, record: TensorRecord) -> None:
        if record.role is Role.PARAMETER_GRADIENT:
            name = f"{self._owner(record)}.parameters_grad.0"
            leaf = self._leaf(record, f"{name}.{record.name}")
            self._data.setdefault(name, {}).setdefault(record.name, [leaf])
            return
        place = _PLACES.get(record.role)
        if place is None or (not record.module and record.function is None):
            return
        phase, direction = place
        name = self._record_name(record, phase)
        entry = self._data.setdefault(name, _blank(phase))
        is_keyword = direction == "input" and phase == "forward" and not record.name[:1].isdigit()
        file = f"{name}.kwargs.{record.name}" if is_keyword else f"{name}.{direction}.{record.name}"
        leaf = self._leaf(record, file)
        if is_keyword:
            keywords = entry["input_kwargs"]
            assert isinstance(keywords, dict)
            keywords[record.name] = leaf
            return
        values = entry["input_args" if (phase, direction) == ("forward", "input") else direction]
        assert isinstance(values, list)
        values.append(leaf)

    def _owner(self, record: TensorRecord) -> str:
        return f"Module.{record.module}.{self._kinds.get(record.module, 'Module')}"

    def _record_name(self, record: TensorRecord, phase: str) -> str:
        calls = self._calls[record.module, record.function or "", phase]
        number = calls.setdefault((record.call, record.occurrence), len(calls))
        if record.function is not None:
            return f"Functional.{record.function.rpartition('.')[2]}.{number}.{phase}"
        return f"{self._owner(record)}.{phase}.{number}"

    def _leaf(self, record: TensorRecord, file: str) -> dict[str, object]:
        leaf: dict[str, object] = {
            "type": "torch.Tensor",
            "dtype": TORCH_DTYPES.get(record.dtype, record.dtype),
            "shape": list(record.shape),
            "Max": None,
            "Min": None,
            "Mean": None,
            "Norm": None,
            "requires_grad": record.requires_grad,
        }
        if record.task is Task.TENSOR and record.blob is not None:
            try:
                tensor = self._side.load(self._rank, record)
            except DamagedRecordError:
                return leaf
            self._keeps_values = True
            torch.save(tensor, self._values / f"{file}.pt")
            return {**leaf, **_numbers(tensor), "data_name": f"{file}.pt"}
        if record.statistics is not None:
            found = record.statistics
            return {**leaf, "Max": found.max, "Min": found.min, "Mean": found.mean, "Norm": found.norm}
        return leaf

    def _construct(self) -> dict[str, str | None]:
        """Each record's enclosing module's record, or null."""
        by_module = {name.rsplit(".", 3)[0]: name for name in self._data if name.startswith("Module.")}
        parents: dict[str, str | None] = {}
        for name in self._data:
            module, _, tail = name.partition(".")[2].rpartition(".forward.")
            path = module.rpartition(".")[0]
            while path and tail:
                path = path.rpartition(".")[0]
                if f"Module.{path}" in by_module:
                    break
            parents[name] = by_module.get(f"Module.{path}") if path else None
        return parents


def _blank(phase: str) -> dict[str, object]:
    if phase == "forward":
        return {"input_args": [], "input_kwargs": {}, "output": []}
    return {"input": [], "output": []}


def _numbers(tensor: Tensor) -> dict[str, float | None]:
    if tensor.numel() == 0:
        return {}
    if not tensor.is_floating_point():
        return {"Max": float(tensor.max()), "Min": float(tensor.min())}
    wide = tensor.float()
    found = {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": wide.norm()}
    return {name: float(value) if math.isfinite(float(value)) else None for name, value in found.items()}
