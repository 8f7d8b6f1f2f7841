"""What the comparisons of a run's captured steps found: one record a step, one line each.

Takes a run folder, or one step's folder in it; gives ``StepVerdict``. Reads ``result.json`` with a bound; a file that is
missing, too long or damaged is no verdict. Loads no torch.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

MAX_RESULT_BYTES = 64_000_000
RESULT, PAGE = "result.json", "report.html"
FOLDER = "consistency"
"""Below a run folder; holds ``step_N``."""
_PREFIX = "step_"
_NOT_OFF = ("equal", "unmatched", "unreadable")


class _First(msgspec.Struct):
    stage: str
    module: str | None = None


class _Coverage(msgspec.Struct):
    rows_rollout: int
    rows_train: int
    rows_matched: int
    modules_matched: int


class _Module(msgspec.Struct):
    module: str
    status: str


class _Result(msgspec.Struct):
    verdict: str
    why: str
    coverage: _Coverage
    modules: list[_Module]
    first_divergence: _First | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepVerdict:
    """Of one captured step.

    Example: ``verdict="rounding", first_module="model.layers.0.self_attn"``: the two sides agree within rounding, and
    that module's output is the first whose bits differ.
    """

    step: int
    verdict: str
    """``equal``, ``rounding``, ``diverged`` or ``incomparable``."""
    why: str
    first_module: str | None
    """The first that differs, in the order of execution; None where none does, or where it is not a module's doing."""
    rows_matched: int
    rows_rollout: int
    modules: int
    """Matched on both sides."""
    page: Path
    """The report."""

    @property
    def is_good(self) -> bool:
        """The two sides agree."""
        return self.verdict in ("equal", "rounding")

    def line(self) -> str:
        """E.g. ``equal (412 rows matched of 412, 38 modules)``; what is not good also says why and where to read on."""
        covered = f"{self.rows_matched:,} rows matched of {self.rows_rollout:,}, {self.modules} modules"
        if self.is_good:
            first = f"; first bits differ in {self.first_module}" if self.first_module else ""
            return f"{self.verdict} ({covered}{first})"
        return f"{self.verdict} ({covered}): {self.why}. Report: {self.page}"


def read_verdict(folder: Path, step: int) -> StepVerdict | None:
    """The verdict in a step's folder, or None where there is none that can be read."""
    try:
        with (folder / RESULT).open("rb") as file:
            data = file.read(MAX_RESULT_BYTES + 1)
        if len(data) > MAX_RESULT_BYTES:
            return None
        result = msgspec.json.decode(data, type=_Result)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return StepVerdict(
        step=step,
        verdict=result.verdict,
        why=result.why,
        first_module=_first_module(result),
        rows_matched=result.coverage.rows_matched,
        rows_rollout=result.coverage.rows_rollout,
        modules=result.coverage.modules_matched,
        page=folder / PAGE,
    )


def read_verdicts(run: Path) -> tuple[StepVerdict, ...]:
    """Of all captured steps of a run that were compared, by step."""
    numbers = sorted(
        int(path.name.removeprefix(_PREFIX))
        for path in (run / FOLDER).glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdecimal()
    )
    found = (read_verdict(run / FOLDER / f"{_PREFIX}{number}", number) for number in numbers)
    return tuple(verdict for verdict in found if verdict is not None)


def _first_module(result: _Result) -> str | None:
    if result.first_divergence is not None:
        return result.first_divergence.module
    return next((item.module for item in result.modules if item.status not in _NOT_OFF), None)
