"""Names of msProbe's records, given in the order of execution. Plain Python.

Takes captured records, and what was observed beside them; gives each the name of its call. Keeps, for one step, which
calls there were, in which order and inside which.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainfer.check.dump.records import TensorRecord
from trainfer.integrations.msprobe.observed import Call
from trainfer.integrations.msprobe.places import function_record, nearest_parent, phase_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """Where one model's records belong: ``Module.{path}.{class}``."""

    paths: Mapping[str, str]
    """msProbe's path of a module (wrappers included), by its bare name; the bare name where it is missing."""
    kinds: Mapping[str, str]
    """Class of a module, by its bare name."""

    def base(self, module: str) -> str | None:
        """``Module.model.layers.0.mlp.Qwen3MLP``; None for the model itself, which msProbe leaves out, and the unknown."""
        path = self.paths.get(module, module)
        return f"Module.{path}.{self.kinds[module]}" if path and module in self.kinds else None


class Ledger:
    """The calls of one step: number, order, and the call that each ran inside."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = defaultdict(int)
        self.parents: dict[str, str | None] = {}
        """In the order of execution."""

    def number(self, base: str, phase: str) -> int:
        """The number of the next call of a module or function."""
        number = self._numbers[base, phase]
        self._numbers[base, phase] += 1
        return number

    def begin(self, name: str, parent: str | None) -> None:
        """A call starts; a known one goes on."""
        self.parents.setdefault(name, parent)


class Namer:
    """Names the records of one capture."""

    def __init__(
        self, ledger: Ledger, naming: Naming, calls: Sequence[Call], call_names: Sequence[str]
    ) -> None:
        self._ledger = ledger
        self._naming = naming
        self._observed: dict[str, list[str]] = defaultdict(list)
        for call, name in zip(calls, call_names, strict=True):
            self._observed[call.module].append(name)
        self._names: dict[tuple[str, str, str, int, int], str | None] = {}
        self._running: dict[str, str] = {}
        self._started: dict[str, int] = defaultdict(int)

    def name(self, record: TensorRecord) -> str | None:
        """The record's name; None for what msProbe has no place for."""
        phase = phase_of(record)
        if phase is None:
            return None
        if phase == "parameters_grad":
            base = self._naming.base(record.module)
            name = None if base is None else f"{base}.parameters_grad.0"
            if name is not None:
                self._ledger.begin(name, None)
            return name
        key = _key(record, phase)
        if key not in self._names:
            self._names[key] = (
                self._of_function(record, phase) if record.function else self._of_module(record, phase)
            )
        return self._names[key]

    def _of_function(self, record: TensorRecord, phase: str) -> str:
        base = function_record(record.function or "")
        forward = self._names.get(_key(record, "forward")) if phase == "backward" else None
        number = self._ledger.number(base, phase) if forward is None else int(forward.rsplit(".", 2)[1])
        name = f"{base}.{number}.{phase}"
        self._ledger.begin(
            name, self._running.get(record.module) or nearest_parent(record.module, self._running)
        )
        return name

    def _of_module(self, record: TensorRecord, phase: str) -> str | None:
        base = self._naming.base(record.module)
        if base is None:
            return None
        if phase == "backward":
            forward = self._names.get(_key(record, "forward"))
            number = self._ledger.number(base, phase) if forward is None else int(forward.rpartition(".")[2])
            name = f"{base}.backward.{number}"
            self._ledger.begin(name, None)
            return name
        name = self._next_observed(record.module) or f"{base}.forward.{self._ledger.number(base, 'forward')}"
        self._ledger.begin(name, nearest_parent(record.module, self._running))
        self._running[record.module] = name
        return name

    def _next_observed(self, module: str) -> str | None:
        names, place = self._observed.get(module, []), self._started[module]
        self._started[module] += 1
        return names[place] if place < len(names) else None


def _key(record: TensorRecord, phase: str) -> tuple[str, str, str, int, int]:
    return (record.module, record.function or "", phase, record.call, record.occurrence)
