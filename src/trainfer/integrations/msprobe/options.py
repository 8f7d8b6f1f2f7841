"""What a ``PrecisionDebugger`` was asked to do: msProbe's ``config.json`` and its constructor's arguments.

Takes a file and arguments (which win over it); gives one frozen record. A key, task or level that msProbe does not
have is an error that names the nearest; what it has and this one cannot do is an error with the remedy; what
has no meaning here is kept as a note, for the debugger to say. Plain Python, no torch.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from trainfer.check.dump.folder import open_plain_file
from trainfer.errors import CaptureError, DumpError

FORMATS = ("msprobe", "trainfer")
TASKS = ("statistics", "tensor", "structure")
LEVELS = ("L0", "L1", "mix", "debug")
DATA_MODES = ("all", "forward", "backward", "input", "output")
SUMMARY_MODES = ("statistics", "md5", "xor")
_MAX_CONFIG_BYTES = 1 << 20

_REFUSED_TASKS = {
    "acc_check": "it re-runs operators against an NPU's results",
    "overflow_check": "it is MindSpore's; a statistics dump shows NaN and inf",
    "free_benchmark": "msProbe itself refuses it since 26.0",
    "exception_dump": "it is Ascend's and MindSpore's",
    "nan_check": "it needs an NPU; a statistics dump shows NaN and inf, and trainfer compare counts them",
    "diff_check": "capture both runs with summary_mode md5 and compare them afterwards",
}
_REFUSED_LEVELS = {"L2": "it dumps Ascend kernels"}
_COMMON = (
    "task", "dump_path", "rank", "step", "level", "async_dump", "dump_enable", "extra_info", "precision", "risk_level",
    "custom_op_namespaces", "format",
)  # fmt: skip
_SECTION = (
    "scope", "list", "tensor_list", "data_mode", "summary_mode", "slice", "request_id", "bench_path", "diff_nums",
    "file_format", "device",
)  # fmt: skip
_SLICE_KEYS = {"dim", "size", "begin", "end"}
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Keep ``begin`` to ``end`` of dimension ``dim`` of every tensor that has ``size`` there."""

    dim: int
    size: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DebuggerOptions:
    """Checked options; empty tuples stand for no limit.

    Example: ``PrecisionDebugger(task="tensor", level="L0", dump_path="d", step=[0])`` has ``steps=(0,)``.
    """

    task: str
    level: str
    dump_path: str
    format: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    enabled: bool | None
    """``dump_enable``; None where the file has none and is not watched."""
    extra_info: bool
    names: tuple[str, ...]
    """``list``."""
    scope: tuple[str, ...]
    tensor_names: tuple[str, ...]
    """``tensor_list``: values for these although the task is statistics."""
    data_mode: tuple[str, ...]
    checksums: bool
    """``summary_mode`` md5: CRC-32 of each tensor."""
    slices: tuple[Slice, ...]
    request_id: str | None
    notes: tuple[str, ...]
    """What was asked for and has no meaning here."""

    @property
    def phases(self) -> frozenset[str]:
        """``forward``, ``backward`` or both."""
        return frozenset({"forward", "backward"} & set(self.data_mode)) or frozenset({"forward", "backward"})

    @property
    def directions(self) -> frozenset[str]:
        """``input``, ``output`` or both."""
        return frozenset({"input", "output"} & set(self.data_mode)) or frozenset({"input", "output"})

    @property
    def needs_values(self) -> bool:
        """True where statistics alone would not do."""
        parts = bool(self.slices) or self.request_id is not None
        return self.task == "tensor" or bool(self.tensor_names) or self.checksums or parts


def load_options(
    config_path: str | Path | None,
    *,
    task: str | None,
    level: str | None,
    dump_path: str | Path | None,
    step: Sequence[int | str] | None,
    format: str | None,
) -> DebuggerOptions:
    """Read ``config.json``, put the arguments over it, check everything.

    Raises:
        DumpError: the file cannot be read.
        CaptureError: a key or a value cannot be.
    """
    given = {} if config_path is None else _read(Path(config_path))
    given |= {
        key: value
        for key, value in {
            "task": task,
            "level": level,
            "dump_path": None if dump_path is None else str(dump_path),
            "step": None if step is None else list(step),
            "format": format,
        }.items()
        if value is not None
    }
    chosen = _choice("task", given.get("task") or "statistics", TASKS, _REFUSED_TASKS)
    _known_keys(given, (*_COMMON, *TASKS, *_REFUSED_TASKS), "config.json")
    section = given.get(chosen) or {}
    if not isinstance(section, dict):
        raise CaptureError(
            f"config.json: {chosen!r} is {section!r}; it is the mapping of that task's options"
        )
    _known_keys(section, _SECTION, f"config.json, section {chosen!r}")
    return _checked(given, cast("dict[str, object]", section), chosen)


def _checked(given: Mapping[str, object], section: Mapping[str, object], task: str) -> DebuggerOptions:
    notes: list[str] = []
    level = _choice("level", given.get("level") or "L1", LEVELS, _REFUSED_LEVELS)
    if task == "structure" and level not in ("L0", "mix"):
        notes.append(f"level {level} with task structure: mix is used, as msProbe does")
        level = "mix"
    if section.get("bench_path"):
        raise CaptureError(
            "bench_path: comparing while the program runs is not done here. Capture with summary_mode md5, then run "
            "`trainfer compare` on the two dumps"
        )
    summary = _choice("summary_mode", section.get("summary_mode") or "statistics", SUMMARY_MODES, {})
    notes += _notes(given, section, summary)
    enabled = given.get("dump_enable")
    return DebuggerOptions(
        task=task,
        level=level,
        dump_path=_text("dump_path", given.get("dump_path") or "./dump_path"),
        format=_choice("format", given.get("format") or "msprobe", FORMATS, {}),
        ranks=_numbers("rank", given.get("rank")),
        steps=_numbers("step", given.get("step")),
        enabled=None if enabled is None else _flag("dump_enable", enabled),
        extra_info=_flag("extra_info", given.get("extra_info", True)),
        names=_texts("list", section.get("list")),
        scope=_scope(section.get("scope")),
        tensor_names=_texts("tensor_list", section.get("tensor_list")),
        data_mode=_data_mode(section.get("data_mode")),
        checksums=summary != "statistics",
        slices=_slices(section.get("slice")),
        request_id=_text("request_id", section["request_id"]) if section.get("request_id") else None,
        notes=tuple(notes),
    )


def _notes(given: Mapping[str, object], section: Mapping[str, object], summary: str) -> list[str]:
    """Options of msProbe that change nothing here, each with what happens instead."""
    said = {
        "async_dump": "values are always handed to a writing thread, and nothing waits on the device until stop()",
        "custom_op_namespaces": "no operator is patched: level L1 sees every function that torch dispatches",
        "file_format": "it belongs to MindSpore",
        "device": "it belongs to MindSpore",
        "diff_nums": "it belongs to bench_path",
    }
    notes = [
        f"{key} has no meaning here: {why}"
        for key, why in said.items()
        if given.get(key) or (section.get(key) and key != "task")
    ]
    if given.get("precision") == "low":
        notes.append("precision low has no meaning here: statistics are taken in float32 or better")
    elif given.get("precision") not in (None, "high"):
        raise CaptureError(f"precision={given['precision']!r} is not known; use 'high' or 'low'")
    if given.get("risk_level"):
        notes.append(
            f"risk_level {given['risk_level']} has no meaning here: what makes no new tensor (a view, a shape) "
            "is left out, all other functions are kept; narrow them with list"
        )
    if summary == "xor":
        notes.append(
            "summary_mode xor has no meaning here: equal halves cancel in it, so different tensors can look equal; "
            "md5 (CRC-32) with statistics is written instead"
        )
    return notes


def _read(path: Path) -> dict[str, object]:
    try:
        with open_plain_file(path) as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
        if len(data) > _MAX_CONFIG_BYTES:
            raise DumpError(
                f"{path} is longer than {_MAX_CONFIG_BYTES} bytes and is no config.json of msProbe"
            )
        found = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise DumpError(f"{path} cannot be read as config.json: {error}") from error
    if not isinstance(found, dict):
        raise DumpError(f"{path} holds a {type(found).__name__}; config.json is a mapping of options")
    return cast("dict[str, object]", found)


def _known_keys(found: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; the nearest is {near[0]!r}" if near else f"; known are {', '.join(known)}"
            raise CaptureError(f"{where}: {key!r} is not known{hint}")


def _choice(name: str, value: object, known: Sequence[str], refused: Mapping[str, str]) -> str:
    if isinstance(value, str) and value in known:
        return value
    if isinstance(value, str) and value in refused:
        raise CaptureError(f"{name} {value!r} is not done here: {refused[value]}. Known: {', '.join(known)}")
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise CaptureError(f"{name}={value!r} is not known{hint}. Known: {', '.join(known)}")


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise CaptureError(f"{name}={value!r}: give true or false")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise CaptureError(f"{name}={value!r}: give a text")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise CaptureError(f"{name}={value!r}: give a list of names or parts of names")
    return tuple(cast("list[str]", value))


def _scope(value: object) -> tuple[str, ...]:
    names = _texts("scope", value)
    if len(names) not in (0, 2):
        raise CaptureError(f"scope={value!r}: give the first and the last record's full names, or none")
    return names


def _data_mode(value: object) -> tuple[str, ...]:
    modes = _texts("data_mode", value) or ("all",)
    for mode in modes:
        _choice("data_mode", mode, DATA_MODES, {})
    if "all" in modes and len(modes) > 1:
        raise CaptureError(f"data_mode={list(modes)!r}: 'all' stands alone")
    return modes


def _numbers(name: str, value: object) -> tuple[int, ...]:
    """Numbers from 0 on: ``[1, "2", "4-6"]``."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise CaptureError(f"{name}={value!r}: give a list of numbers, '3' or '4-6'")
    found: set[int] = set()
    for item in cast("list[object]", value):
        match = (
            _RANGE.fullmatch(str(item))
            if isinstance(item, str | int) and not isinstance(item, bool)
            else None
        )
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not match or last < first:
            raise CaptureError(f"{name}: {item!r} is no number from 0 on and no range such as '4-6'")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _slices(value: object) -> tuple[Slice, ...]:
    if not value:
        return ()
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    found: list[Slice] = []
    for item in items:
        entry = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        numbers = {key: number for key, number in entry.items() if isinstance(number, int)}
        if (
            set(entry) != _SLICE_KEYS
            or len(numbers) != 4
            or not 0 <= numbers["begin"] < numbers["end"] <= numbers["size"]
        ):
            raise CaptureError(
                f"slice: {item!r} is none; give dim, size, begin and end with 0 <= begin < end <= size"
            )
        found.append(Slice(**numbers))
    return tuple(found)
