"""metrics.jsonl: one JSON object a step.

Takes a step number and a flat mapping of numbers; gives a line such as
``{"step": 3, "actor/pg_loss": -0.0125, "actor/grad_norm": null, "non_finite": {"actor/grad_norm": "nan"}}``.
Floats are written with the shortest digits that read back to the same float. JSON knows no NaN and no
infinity: such a value is ``null``, and the key ``non_finite`` (present only then) says which it was:
``nan``, ``inf`` or ``-inf``. Readers that take null for NaN (pandas, for one) need nothing else.

A line is handed to the operating system at once, so a killed process loses no step; ``sync`` forces the
lines to disk and is called before a checkpoint. A disk that fills up does not end training: the lines wait
in memory and are written when there is room.

Leaves out what the numbers mean, and other loggers (``loggers.py``).
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from trainfer.errors import RunFolderError

logger = logging.getLogger(__name__)

STEP_KEY = "step"
NON_FINITE_KEY = "non_finite"
MAX_LINE_BYTES = 4_000_000
"""A longer line is damage, not metrics: reading stays bounded."""


def encode_line(step: int, metrics: Mapping[str, float]) -> bytes:
    """One strict JSON object with a newline; ``step`` first, then the metrics in their order."""
    assert STEP_KEY not in metrics, "the step is an argument"
    assert NON_FINITE_KEY not in metrics, "this name is the file format's"
    record: dict[str, object] = {STEP_KEY: step}
    non_finite: dict[str, str] = {}
    for name, value in metrics.items():
        number = value if isinstance(value, int) else float(value)
        if math.isfinite(number):
            record[name] = number
        else:
            record[name] = None
            non_finite[name] = repr(number)
    if non_finite:
        record[NON_FINITE_KEY] = non_finite
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def decode_line(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Step and metrics of one line, NaN and infinity restored; None when the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.pop(STEP_KEY, None)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    named = record.pop(NON_FINITE_KEY, None)
    if isinstance(named, dict):
        record.update({name: float(word) for name, word in named.items() if word in ("nan", "inf", "-inf")})
    return step, {name: value for name, value in record.items() if isinstance(value, int | float)}


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Every readable step of a metrics file, in the file's order; damaged lines are left out.

    Raises:
        RunFolderError: the file cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RunFolderError(
            f"Cannot read {path}: {error.strerror}. It is written by `trainfer train`."
        ) from error
    with file:
        for line, _ in _bounded_lines(file):
            decoded = decode_line(line)
            if decoded is not None:
                yield decoded


def _bounded_lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(line, whole) pairs; a line over the limit comes in pieces that decode to nothing."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line, line.endswith(b"\n")


class MetricsLog:
    """Appends to metrics.jsonl; used by one process at a time (the run folder's lock sees to it)."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        """Open ``path`` for the steps after ``resumed_step`` (0: a new run).

        Lines of later steps and a torn last line are cut off, so that the resumed run writes the file
        that an uninterrupted run would have written; how many steps that costs is logged.

        Raises:
            RunFolderError: the file cannot be opened or cut.
        """
        self.path = path
        self._pending: list[bytes] = []
        self._warned = False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = _bytes_up_to(path, resumed_step)
            lost = _steps_from(path, self._size)
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            raise RunFolderError(
                f"Cannot write {path}: {error.strerror}. Give the run a folder it may write to "
                "(trainer.default_local_dir)."
            ) from error
        if lost:
            logger.warning(
                "%d step(s) after step %d are in no checkpoint; their metrics are removed and they are trained again.",
                lost,
                resumed_step,
            )

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. A full disk is a warning, once; the line is written later."""
        self._pending.append(encode_line(step, metrics))
        self._write_pending()

    def sync(self) -> None:
        """Force everything to disk: called before a checkpoint, so that no checkpoint is ahead of its metrics."""
        self._write_pending()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            logger.warning("%s cannot be forced to disk (%s); training goes on.", self.path, error)

    def close(self) -> None:
        """Write what waits, force it to disk, close."""
        self.sync()
        os.close(self._descriptor)

    def _write_pending(self) -> None:
        data = b"".join(self._pending)
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)  # no half line stays behind
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot be written (%s); training goes on and the steps are written when it can be.",
                    self.path,
                    error,
                )
            return
        self._size += len(data)
        self._pending.clear()
        self._warned = False


def _write_all(descriptor: int, data: bytes) -> None:
    """A short write is a full disk in the making: trying the rest brings the error."""
    while data:
        data = data[os.write(descriptor, data) :]


def _bytes_up_to(path: Path, last_step: int) -> int:
    """Length of the part of the file that belongs to steps up to ``last_step``."""
    kept = 0
    with path.open("rb") as file:
        for line, whole in _bounded_lines(file):
            decoded = decode_line(line)
            if not whole or (decoded is not None and decoded[0] > last_step) or last_step == 0:
                break
            if decoded is None:
                logger.warning("%s holds a damaged line at byte %d; it is left as it is.", path, kept)
            kept += len(line)
    return kept


def _steps_from(path: Path, offset: int) -> int:
    """Whole steps that stand behind ``offset``."""
    with path.open("rb") as file:
        file.seek(offset)
        return sum(decode_line(line) is not None for line, _ in _bounded_lines(file))
