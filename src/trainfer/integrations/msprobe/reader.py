"""Reads msProbe's dumps: ``dump.json`` with ``dump_tensor_data/*.pt``, tasks tensor and statistics.

Takes a folder (the dump path, one step or one rank); gives a side that the comparison reads like trainfer's own.
Rows are not known there, so calls are joined in their order. Tensors are loaded with ``weights_only``; a
file that is missing, foreign or of another shape than its record is told, never taken for equal.
"""

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainfer.check.dump.folder import open_plain_file
from trainfer.check.dump.reader import ROW_TYPE, DamagedRecordError
from trainfer.check.dump.records import (
    NO_TABLE,
    SCHEMA,
    Blob,
    CallRecord,
    Manifest,
    ModuleEntry,
    Role,
    RowsRecord,
    SequenceRecord,
    Task,
    TensorRecord,
    WeightRecord,
)
from trainfer.check.dump.tensors import DTYPES as TORCH_TYPES
from trainfer.errors import DumpError
from trainfer.exact.fingerprint import fingerprint
from trainfer.integrations.msprobe.names import (
    DTYPES,
    ROLES,
    RecordName,
    parse_name,
    statistics_of,
    tensor_leaves,
)

MAX_JSON_BYTES = 1 << 30
_REFUSED = ""
"""In place of a file name that leaves the folder."""
_ZIP_START = b"PK\x03\x04"
_FILE_SLACK = 1 << 16
"""Bytes that a file may have beside its values."""
_RANK = re.compile(r"(?:rank|proc)(\d{1,9})")
_STEP = re.compile(r"step(\d{1,9})")


def is_msprobe_dump(folder: Path) -> bool:
    """True where a folder holds msProbe's ``dump.json``, in itself or in its step and rank folders."""
    return bool(_rank_folders(folder))


def _rank_folders(folder: Path) -> list[tuple[int, int, Path]]:
    """(step, rank, folder) of every ``dump.json``."""
    if (folder / "dump.json").is_file():
        return [(0, 0, folder)]
    found: list[tuple[int, int, Path]] = []
    steps = [(int(match[1]), path) for path, match in _children(folder, _STEP)] or [(0, folder)]
    for step, path in steps:
        ranks = [
            (int(match[1]) if match[0].startswith("rank") else 0, rank)
            for rank, match in _children(path, _RANK)
        ]
        found += [(step, number, rank) for number, rank in ranks if (rank / "dump.json").is_file()]
    return sorted(found)


def _children(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return []
    matches = [(path, pattern.fullmatch(path.name)) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [(path, match) for path, match in matches if match is not None]


class MsprobeSide:
    """One msProbe dump as a side."""

    def __init__(self, folder: Path | str) -> None:
        """Read every ``dump.json`` below the folder.

        Raises:
            DumpError: there is none, or one is not JSON of that form.
        """
        self.folder = Path(folder)
        self._problems: dict[str, None] = {}
        self._folders: dict[tuple[int, int], Path] = {}
        self._records: dict[int, list[TensorRecord]] = {}
        self._weights: dict[int, list[WeightRecord]] = {}
        self._kinds: dict[str, str] = {}
        self._hides_weights = False
        folders = _rank_folders(self.folder)
        if not folders:
            raise DumpError(f"{self.folder} holds no dump.json of msProbe, nor do its step and rank folders")
        for step, rank, path in folders:
            if (step, rank) in self._folders:
                raise DumpError(f"{path.parent} holds dumps of two processes without rank; name one of them")
            self._folders[step, rank] = path
            self._read(step, rank, path)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def manifest(self) -> Manifest:
        """As much of one as msProbe knows."""
        ranks = self.ranks
        return Manifest(
            schema=SCHEMA,
            side="",
            run_id="",
            launch_id="",
            rank=ranks[0],
            world_size=len(ranks),
            ranks=ranks,
            created="",
            finished="unknown",
            complete=True,
            incomplete_reasons=(),
            capture={"format": "msprobe"},
            config={},
            model_class="",
            model_config={},
            model_dtype="",
            modules=tuple(
                ModuleEntry(name=name, kind=kind, training=False, attributes={})
                for name, kind in self._kinds.items()
            ),
            versions={},
            seed=None,
            counts={},
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that wrote something."""
        return tuple(sorted({rank for _, rank in self._folders}))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Unknown: msProbe does not say how many there were."""
        return ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Records that could not be understood."""
        return tuple(self._problems)

    def tensors(
        self, rank: int, *, keep: Callable[[TensorRecord], bool] | None = None
    ) -> Iterator[TensorRecord]:
        """Tensor records in msProbe's order, which is that of completion."""
        for record in self._records.get(rank, []):
            if keep is None or keep(record):
                yield record

    def calls(self, rank: int) -> Mapping[int, CallRecord]:
        """None: msProbe counts calls per module, which is ``occurrence`` here."""
        del rank
        return {}

    def row_tables(self, rank: int) -> Mapping[int, RowsRecord]:
        """None."""
        del rank
        return {}

    def rows(self, rank: int, record: RowsRecord) -> np.ndarray:
        """None."""
        del rank, record
        return np.empty(0, dtype=ROW_TYPE)

    def sequences(self, rank: int) -> Iterator[SequenceRecord]:
        """None: log-probs are not part of msProbe's dumps."""
        del rank
        return iter(())

    def weights(self, rank: int) -> Iterator[WeightRecord]:
        """Parameters that came with forward records, by fingerprint or, without values, by their statistics."""
        return iter(() if self._hides_weights else self._weights.get(rank, []))

    @property
    def has_values(self) -> bool:
        """True where weights are known by their values, and not by their statistics alone."""
        return any(weight.blob is not None for weights in self._weights.values() for weight in weights)

    def hide_weights(self) -> None:
        """Tell no weights: statistics prove nothing against the values of another dump."""
        self._hides_weights = True

    def load(self, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
        """The values of a record.

        Raises:
            DamagedRecordError: the file is missing, not a tensor, or another one than its record says.
        """
        if record.blob is None:
            raise DamagedRecordError(f"{record.module}.{record.name} was dumped without its values")
        step, _, name = record.blob.shard.partition("/")
        if name == _REFUSED:
            raise DamagedRecordError(f"{record.module}.{record.name}: its file's name was refused")
        path = self._folders[int(step), rank] / "dump_tensor_data" / name
        tensor = _load_file(path, record.blob.nbytes)
        if tuple(tensor.shape) != record.shape or tensor.dtype is not TORCH_TYPES[record.dtype]:
            raise DamagedRecordError(
                f"{path.name} holds {tensor.dtype} {tuple(tensor.shape)}, dump.json says {record.dtype} {record.shape}"
            )
        return tensor

    def _read(self, step: int, rank: int, folder: Path) -> None:
        path = folder / "dump.json"
        data = _read_json(path)
        records = data.get("data")
        if not isinstance(records, dict) or not records:
            raise DumpError(f"{path} has no records under 'data': the dump was cut short or never stopped")
        task = Task.TENSOR if data.get("task") == "tensor" else Task.STATISTICS
        for name, record in cast("dict[str, object]", records).items():
            parsed = parse_name(name)
            if parsed is None or not isinstance(record, dict):
                self._problems[f"{path}: {name!r} is not a record of msProbe"] = None
                continue
            if parsed.kind:
                self._kinds.setdefault(parsed.module, parsed.kind)
            self._add(step, rank, parsed, task, cast("dict[str, object]", record))

    def _add(self, step: int, rank: int, name: RecordName, task: Task, record: Mapping[str, object]) -> None:
        out = self._records.setdefault(rank, [])
        if name.phase == "parameters_grad":
            for local, leaf in tensor_leaves(record, ""):
                self._tensor(out, step, name, Role.PARAMETER_GRADIENT, local.removesuffix(".0"), task, leaf)
            return
        for key, value in record.items():
            role = ROLES.get((name.phase, key))
            if role is not None:
                for local, leaf in tensor_leaves(value, ""):
                    self._tensor(out, step, name, role, local, task, leaf)
        parameters = record.get("parameters")
        if name.phase == "forward" and name.call == 0 and parameters is not None:
            for local, leaf in tensor_leaves(parameters, ""):
                self._weight(step, rank, name, local, leaf)

    def _tensor(
        self,
        out: list[TensorRecord],
        step: int,
        name: RecordName,
        role: Role,
        local: str,
        task: Task,
        leaf: Mapping[str, object],
    ) -> None:
        described = self._described(step, name.module or str(name.function), local, leaf)
        if described is None:
            return
        dtype, shape, blob = described
        out.append(
            TensorRecord(
                id=len(out),
                task=task if blob is not None or task is Task.STATISTICS else Task.STATISTICS,
                step=step,
                pass_name="forward",
                call=0,
                module=name.module,
                occurrence=name.call,
                function=name.function,
                role=role,
                name=local,
                dtype=dtype,
                shape=shape,
                row_dims=(),
                table=NO_TABLE,
                device="cpu",
                requires_grad=leaf.get("requires_grad") is True,
                blob=blob,
                statistics=statistics_of(leaf, shape),
            )
        )

    def _weight(self, step: int, rank: int, name: RecordName, local: str, leaf: Mapping[str, object]) -> None:
        described = self._described(step, name.module, local, leaf)
        if described is None:
            return
        dtype, shape, blob = described
        weight = WeightRecord(
            name=f"{name.module}.{local}",
            module=name.module,
            role=Role.PARAMETER,
            dtype=dtype,
            shape=shape,
            fingerprint="",
            weights_version=step,
            requires_grad=leaf.get("requires_grad") is True,
            blob=blob,
        )
        numbers = [leaf.get(key) for key in ("Max", "Min", "Mean", "Norm")]
        text = f"statistics:{math.prod(shape)}:{numbers}" if None not in numbers else ""
        if blob is not None:
            try:
                text = fingerprint(self.load(rank, weight))
            except DamagedRecordError as error:
                self._problems[str(error)] = None
                text = ""
        weights = self._weights.setdefault(rank, [])
        weights.append(msgspec.structs.replace(weight, fingerprint=text))

    def _described(
        self, step: int, module: str, local: str, leaf: Mapping[str, object]
    ) -> tuple[str, tuple[int, ...], Blob | None] | None:
        dtype, shape = DTYPES.get(str(leaf.get("dtype"))), leaf.get("shape")
        sizes = cast("list[object]", shape) if isinstance(shape, list) else None
        if (
            dtype is None
            or sizes is None
            or not all(isinstance(size, int) and 0 <= size < 1 << 40 for size in sizes)
        ):
            self._problems[
                f"{module}.{local}: dtype {leaf.get('dtype')!r}, shape {shape!r} cannot be read"
            ] = None
            return None
        whole = tuple(cast("list[int]", sizes))
        name, blob = leaf.get("data_name"), None
        if isinstance(name, str):
            if Path(name).name != name or name in ("", ".", ".."):
                self._problems[f"{module}.{local}: {name!r} is not the name of a file and is not opened"] = (
                    None
                )
                name = _REFUSED
            nbytes = math.prod(whole) * TORCH_TYPES[dtype].itemsize
            blob = Blob(shard=f"{step}/{name}", offset=0, nbytes=nbytes, checksum="")
        return dtype, whole, blob


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        with open_plain_file(path) as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise DumpError(f"{path} is longer than {MAX_JSON_BYTES} bytes and is not read")
        found = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DumpError(f"{path} is not the dump.json of msProbe: it holds a {type(found).__name__}")
    return cast("dict[str, object]", found)


def _load_file(path: Path, nbytes: int) -> Tensor:
    try:
        with open_plain_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            fits = size <= 2 * nbytes + _FILE_SLACK
            is_archive = file.read(4) == _ZIP_START
            file.seek(0)
            value = torch.load(file, map_location="cpu", weights_only=True) if fits and is_archive else None
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        pickle.UnpicklingError,
        DumpError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedRecordError(f"{path.name} cannot be read as a tensor: {reason}") from error
    if not is_archive:
        raise DamagedRecordError(f"{path.name} is not an archive of torch.save; bare pickles are not read")
    if not fits:
        raise DamagedRecordError(f"{path.name} has {size} bytes for a tensor of {nbytes}")
    if not isinstance(value, Tensor):
        raise DamagedRecordError(f"{path.name} holds a {type(value).__name__}, not a tensor")
    return value.detach()
