"""Writes msProbe's format from any side, so that its tools read what trainfer captured.

Takes a side and a folder; gives ``step{N}/rank{R}`` with ``dump.json``, ``construct.json``, ``stack.json`` and, where
values were captured, ``dump_tensor_data/*.pt``. A module's calls are numbered in the order of execution, as msProbe
does. Rows, sequences and log-probs have no place in that format and are left out.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import Task, TensorRecord
from trainfer.errors import DumpError
from trainfer.integrations.msprobe.leaf import TENSOR_FOLDER, Keep, Leaf, statistics_leaf, tensor_leaf
from trainfer.integrations.msprobe.names import TORCH_DTYPES
from trainfer.integrations.msprobe.naming import Ledger, Namer, Naming
from trainfer.integrations.msprobe.observed import Call, Frames, stack_lines
from trainfer.integrations.msprobe.options import DebuggerOptions, load_options
from trainfer.integrations.msprobe.places import blank_record, next_place, phase_of, put, spot_of
from trainfer.integrations.msprobe.selection import chosen_names


def write_msprobe(side: ReadableSide, folder: Path) -> Path:
    """Write one side in msProbe's format; gives the folder.

    Raises:
        DumpError: the folder is in use or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DumpError(
            f"{folder} is not empty; msProbe's files would mix with what is there. Name another folder"
        )
    naming = Naming(paths={}, kinds={entry.name: entry.kind for entry in side.manifest.modules})
    for rank in side.ranks:
        steps: dict[int, list[TensorRecord]] = defaultdict(list)
        for record in side.tensors(rank):
            steps[record.step].append(record)
        for step, records in steps.items():
            has_values = any(record.blob is not None for record in records)
            options = load_options(
                None,
                task="tensor" if has_values else None,
                level="L0",
                dump_path=folder,
                step=None,
                format=None,
            )
            writer = StepWriter(folder / f"step{step}" / f"rank{rank}", options)
            try:
                writer.add(side, rank, records, naming)
                writer.write()
            except OSError as error:
                raise DumpError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


class StepWriter:
    """One step of one rank; may take several captures, one after the other."""

    def __init__(self, folder: Path, options: DebuggerOptions) -> None:
        self.folder = folder
        self._options = options
        self._data: dict[str, dict[str, object]] = {}
        self._last: dict[str, int] = {}
        """Place of a record's last tensor: records stand in the order of completion."""
        self.ledger = Ledger()
        self._frames: dict[str, Frames] = {}
        self._parameters: dict[str, dict[str, Leaf]] = defaultdict(dict)
        self._num_tensors = 0

    @property
    def is_empty(self) -> bool:
        """True where nothing was recorded."""
        return not self.ledger.parents

    def use(self, options: DebuggerOptions) -> None:
        """What follows is kept by these options."""
        self._options = options

    def keep_parameter(self, record: str, local: str, tensor: Tensor) -> None:
        """A weight as it was when the call began.

        Raises:
            OSError: the file cannot be written.
        """
        if self._options.task == "structure" or "forward" not in self._options.phases:
            return
        keep = self._keep(record, slices=False)
        leaf = tensor_leaf(tensor, f"{record}.parameters.{local}", self.folder, keep, requires_grad=True)
        self._parameters[record][local] = leaf

    def add(
        self,
        side: ReadableSide,
        rank: int,
        records: Sequence[TensorRecord],
        naming: Naming,
        calls: Sequence[Call] = (),
        call_names: Sequence[str] = (),
    ) -> None:
        """Add what one capture recorded.

        Args:
            side: Where the values are.
            rank: Of the side.
            records: In the order of execution.
            naming: Paths and classes of the modules.
            calls: What was observed beside the tensors, in the order of execution.
            call_names: The record of each of those calls.

        Raises:
            OSError: a file cannot be written.
        """
        self._begin_calls(calls, call_names)
        namer = Namer(self.ledger, naming, calls, call_names)
        names = [namer.name(record) for record in records]
        wanted = set(chosen_names(self._options, self.ledger.parents, self.ledger.parents))
        for record, name in zip(records, names, strict=True):
            if name is not None and name in wanted:
                self._add_tensor(side, rank, record, name)
        self._add_arguments(calls, call_names, wanted)
        self._add_parameters(wanted)

    def write(self) -> None:
        """Write the JSON files; may be called again after more was added.

        Raises:
            OSError: they cannot be written.
        """
        options = self._options
        self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(self._data, key=lambda name: self._last.get(name, -1))
        has_values = (self.folder / TENSOR_FOLDER).is_dir()
        head = {
            "task": options.task,
            "level": options.level,
            "framework": "pytorch",
            "dump_data_dir": str(self.folder.absolute() / TENSOR_FOLDER) if has_values else None,
            "data": {} if options.task == "structure" else {name: self._data[name] for name in names},
        }
        write_json(self.folder / "dump.json", head)
        if options.extra_info:
            write_json(self.folder / "construct.json", self.ledger.parents)
            write_json(self.folder / "stack.json", self._stacks())

    def _begin_calls(self, calls: Sequence[Call], call_names: Sequence[str]) -> None:
        for call, name in zip(calls, call_names, strict=True):
            if not name:
                continue
            parent = call.parent
            while parent is not None and not call_names[parent]:
                parent = calls[parent].parent
            self.ledger.begin(name, None if parent is None else call_names[parent])
            self._frames[name] = call.frames

    def _add_tensor(self, side: ReadableSide, rank: int, record: TensorRecord, name: str) -> None:
        spot = spot_of(record)
        self._num_tensors += 1
        self._last[name] = self._num_tensors
        if spot.direction not in self._options.directions or self._options.task == "structure":
            return
        phase = phase_of(record) or ""
        entry = self._data.setdefault(name, blank_record(phase))
        path = spot.path or next_place(entry, spot.field)
        suffix = f"{spot.suffix}.{path}" if phase == "backward" else spot.suffix
        put(entry, spot.field, path, self._leaf(side, rank, record, name, suffix))

    def _leaf(self, side: ReadableSide, rank: int, record: TensorRecord, name: str, suffix: str) -> Leaf:
        if record.task is Task.TENSOR and record.blob is not None:
            try:
                tensor = side.load(rank, record)
            except DamagedRecordError:
                tensor = None
            if tensor is not None:
                keep, file = self._keep(name, slices=True), f"{name}.{suffix}"
                return tensor_leaf(tensor, file, self.folder, keep, requires_grad=record.requires_grad)
        return statistics_leaf(
            record.statistics,
            TORCH_DTYPES.get(record.dtype, record.dtype),
            record.shape,
            requires_grad=record.requires_grad,
            is_number=record.dtype[:1] in "FBC" and record.dtype != "BOOL",
        )

    def _keep(self, name: str, *, slices: bool) -> Keep:
        options = self._options
        values = options.task == "tensor" or any(part in name for part in options.tensor_names)
        return Keep(values=values, checksum=options.checksums, slices=options.slices if slices else ())

    def _add_arguments(self, calls: Sequence[Call], call_names: Sequence[str], wanted: set[str]) -> None:
        if "input" not in self._options.directions:
            return
        for call, name in zip(calls, call_names, strict=True):
            entry = self._data.get(name)
            if entry is None or name not in wanted:
                continue
            for path, leaf in call.arguments:
                put(entry, "input_args" if path[:1].isdigit() else "input_kwargs", path, leaf)

    def _add_parameters(self, wanted: set[str]) -> None:
        for name, leaves in self._parameters.items():
            if name in wanted and name in self._data:
                self._data[name]["parameters"] = leaves
                continue
            for leaf in leaves.values():
                if "data_name" in leaf:
                    (self.folder / TENSOR_FOLDER / str(leaf["data_name"])).unlink(missing_ok=True)
        for name, entry in self._data.items():
            if name.startswith("Module.") and "output" in entry and "input_args" in entry:
                entry.setdefault("parameters", {})
        self._parameters.clear()

    def _stacks(self) -> dict[str, list[object]]:
        groups: dict[Frames, list[str]] = defaultdict(list)
        for name, frames in self._frames.items():
            if frames:
                groups[frames].append(name)
        return {
            str(number): [names, stack_lines(frames)] for number, (frames, names) in enumerate(groups.items())
        }


def write_json(path: Path, value: object) -> None:
    """Write a JSON file of msProbe, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
    draft.replace(path)
