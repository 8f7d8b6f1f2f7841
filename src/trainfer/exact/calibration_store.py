"""Calibrations that were made before, in the user's cache folder: one small JSON file each.

Takes a model; gives its ``Calibration``, measured now or read. A file's name is a digest of everything that the answer
depends on: processor, PyTorch's build with its libraries, number of threads, device, the model's class, configuration,
shapes and dtypes, and the rules of this version. What cannot be read is measured anew; what cannot be written
is not kept.
"""

import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from trainfer.exact.calibration import Calibration, Problem, calibrate
from trainfer.exact.row_problems import DECODE_ROWS
from trainfer.exact.rules import KEY_BLOCK, KEY_MULTIPLE

VERSION = 2
"""Raise it when the functions that are measured change."""


class _Config(Protocol):
    def to_json_string(self) -> str: ...


def calibration_of(model: nn.Module, *, folder: Path | None = None) -> Calibration:
    """The calibration of a model on this machine.

    Args:
        model: See ``calibrate``.
        folder: Where calibrations are kept; None is ``cache_folder()``.
    """
    file = (folder if folder is not None else cache_folder()) / f"{_digest(model)}.json"
    known = _read(file)
    if known is not None:
        return known
    measured = calibrate(model)
    _write(file, measured)
    return measured


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/trainfer/calibration``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "trainfer" / "calibration"


def machine(device: torch.device) -> str:
    """Everything about this machine that decides an order of summation."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}\n{torch.__config__.show()}"
    return f"{_processor()}\n{torch.get_num_threads()} threads\n{torch.__config__.show()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = {
        line
        for line in lines
        if line.startswith(("model name", "cpu family", "model\t", "stepping", "flags"))
    }
    return "\n".join(sorted(kept)) or platform.processor()


def _digest(model: nn.Module) -> str:
    config = cast("_Config | None", vars(model).get("config"))
    parts = [
        f"{VERSION} {type(model).__module__}.{type(model).__qualname__} {torch.__version__}",
        machine(next(model.parameters()).device),
        config.to_json_string() if config is not None else "",
        *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.named_parameters()),
        *(
            f"{name} {type(module).__module__}.{type(module).__qualname__}"
            for name, module in model.named_modules()
        ),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(file: Path) -> Calibration | None:
    """None where there is none, or one that this version did not write."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        lengths, rows = tuple(record["safe_key_lengths"]), record["decode_rows"]
        problems = tuple(
            Problem(operator=str(p["operator"]), detail=str(p["detail"])) for p in record["problems"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    allowed = range(KEY_MULTIPLE, KEY_BLOCK + 1, KEY_MULTIPLE)
    is_sound = lengths and lengths[-1] == KEY_BLOCK and list(lengths) == [n for n in allowed if n in lengths]
    if not is_sound or rows not in DECODE_ROWS:
        return None
    return Calibration(safe_key_lengths=lengths, problems=problems, decode_rows=rows)


def _write(file: Path, calibration: Calibration) -> None:
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dataclasses.asdict(calibration)), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        return
