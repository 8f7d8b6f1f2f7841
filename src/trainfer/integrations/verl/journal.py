"""What happened in one process of an attached run: which functions were hooked, what went wrong.

Each process appends JSON lines to ``OUT/processes/PID.jsonl``; ``trainfer attach`` reads them all at the end. Nothing here raises:
a folder that cannot be written costs the lines alone, and standard error says so.
"""

import os
import sys
from pathlib import Path

import msgspec

from trainfer.integrations.verl.settings import AttachSettings

MAX_PROBLEMS = 100
"""Lines about problems of one process; what follows is counted by nobody."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line."""

    kind: str
    """``hooked``, ``missing``, ``problem`` or ``note``."""
    text: str
    process: str = ""


class Journal:
    """The lines of this process."""

    def __init__(self, settings: AttachSettings) -> None:
        self._folder = settings.folder / "processes"
        self._num_problems = 0

    def hooked(self, text: str) -> None:
        """A function was hooked."""
        self._write("hooked", text)

    def missing(self, text: str) -> None:
        """A function of the table is not there."""
        self._write("missing", text)

    def note(self, text: str) -> None:
        """Something worth telling at the end; it is said at once as well."""
        print(f"trainfer attach: {text}", file=sys.stderr, flush=True)  # noqa: T201 (verl's log)
        self._write("note", text)

    def problem(self, text: str) -> None:
        """Something was not captured; the run goes on."""
        self._num_problems += 1
        if self._num_problems <= MAX_PROBLEMS:
            print(f"trainfer attach: {text} (the run goes on)", file=sys.stderr, flush=True)  # noqa: T201 (verl's log)
            self._write("problem", text)

    def _write(self, kind: str, text: str) -> None:
        line = msgspec.json.encode(Line(kind=kind, text=text[:2000], process=_process_name())) + b"\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"{os.getpid()}.jsonl").open("ab") as file:
                file.write(line)
        except OSError as error:
            print(f"trainfer attach: {text} (and {self._folder} cannot be written: {error})", file=sys.stderr)  # noqa: T201


def _process_name() -> str:
    """As the process list shows it: ``ray::WorkerDict``, ``VLLM::Worker``."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    except OSError:
        return sys.argv[0] if sys.argv else ""
    return b" ".join(words[:3]).decode(errors="replace").strip()[:80]


def read_journals(folder: Path) -> list[Line]:
    """The lines of all processes below an attached run's folder; a torn last line is left out."""
    lines: list[Line] = []
    for path in sorted((folder / "processes").glob("*.jsonl")):
        for text in path.read_bytes().split(b"\n"):
            try:
                lines.append(msgspec.json.decode(text, type=Line))
            except msgspec.DecodeError:
                continue
    return lines
