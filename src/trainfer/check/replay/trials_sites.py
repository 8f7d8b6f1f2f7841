"""A place where one side introduces an error, and what an assumption makes of it.

Takes traces of one side; gives the rows of one place (computed from captured values, and captured), and the error that
is left when another computation stands there. What the assumptions are is said family by family (``trials_rope`` ...).

Axes: T tokens, D features.
"""
# pyright: standard
# (modules are untyped in torch)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfer.check.replay.hypotheses import Hypothesis
from trainfer.check.replay.trials_forced import Place, Seen, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One module of one side, with its places."""

    module: str
    kind: str
    """``norm``, ``rotary``, ``attention``, ``head``, ``linear``, ``embedding``, ``dropout``, ``router`` or ``other``."""
    side: str
    layer: nn.Module
    """The reference's module, in high precision."""
    places: tuple[Place, ...]
    """Whose rows, side by side, are the site's: an attention's is its output projection's input."""
    traces: tuple[Trace, ...]
    floor: float
    """What rounding may introduce here, relative."""
    attributes: Mapping[str, object]
    """The side's own, from its manifest; empty where it has no module of this name."""
    training: bool = False
    """The module's flag in the manifest."""
    root: nn.Module | None = None
    """The whole reference model."""

    def rows(self, trace: Trace) -> tuple[Tensor, Tensor, Tensor] | None:
        """Computed, captured, known: of one sequence; None where nothing was captured."""
        seen = [trace.seen.get(place) for place in self.places]
        found = [s for s in seen if s is not None and s.captured_TD is not None]
        if len(found) != len(self.places):
            return None
        known = found[0].known_T
        for item in found[1:]:
            known = known & item.known_T
        captured = [s.captured_TD for s in found if s.captured_TD is not None]
        return torch.cat([s.computed_TD for s in found], 1), torch.cat(captured, 1), known

    def usable(self) -> list[Trace]:
        """Traces with captured rows here."""
        return [trace for trace in self.traces if self.rows(trace) is not None]

    def given(self, trace: Trace) -> Tensor | None:
        """What the module was given on one sequence."""
        seen = trace.at(self.module, "input")
        return None if seen is None else seen.used_TD

    @property
    def dtype(self) -> str:
        """As captured."""
        seen = [self.traces[0].seen[place] for place in self.places if place in self.traces[0].seen]
        return seen[0].dtype if seen else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An assumption, and the rows that it gives, one tensor per usable trace."""

    hypothesis: Hypothesis
    predicted: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the error."""

    hypothesis: Hypothesis
    reproduced: bool
    before: float
    after: float
    spread: float
    """Root mean square of the error left, over that before, of the rows that were off: smaller is better."""


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


LOW_DTYPES: Mapping[str, torch.dtype] = {name: TORCH_DTYPES[name] for name in ("BF16", "F16")}
"""What a computation may be rounded to on its way."""


def relative(captured_TD: Tensor, computed_TD: Tensor) -> NDArray[np.float64]:
    """‖captured − computed‖ / ‖computed‖ per row; inf where not finite."""
    off = torch.linalg.vector_norm(captured_TD - computed_TD, dim=1)
    size = torch.linalg.vector_norm(computed_TD, dim=1).clamp_min(1e-30)
    return torch.nan_to_num(off / size, nan=torch.inf).numpy()


def errors(site: Site, predicted: Sequence[Tensor] | None = None) -> NDArray[np.float64]:
    """Errors of all known rows, trace after trace; of the reference itself without a prediction."""
    parts: list[NDArray[np.float64]] = []
    for number, trace in enumerate(site.usable()):
        rows = site.rows(trace)
        assert rows is not None
        computed, captured, known = rows
        other = computed if predicted is None else predicted[number]
        parts.append(relative(captured[known], other[known]))
    return np.concatenate([np.empty(0), *parts])


_MARGIN = 1.5
"""Times the floor: what a reproduced row may be off, the floor being a measured maximum of its own sample."""
_FITTED, _MOST_OF_IT = 8.0, 0.01
"""Times the floor, where all but this share of the error is gone: a fitted number is known to rounding only."""
_MOST = 0.75
"""Of the rows that were off: so many come out exactly where the assumption puts values on a grid."""
_LITTLE = 0.1
"""Of the error: so little may be left where many grid points make up one row."""


def weigh(site: Site, attempt: Attempt) -> Outcome:
    """Hold an assumption's rows against the captured ones."""
    before, after = errors(site), errors(site, attempt.predicted)
    concerned = before > site.floor
    concerned = concerned if concerned.any() else np.ones_like(concerned)
    first, last = _rms(before[concerned]), _rms(after[concerned])
    worst = float(after.max(initial=0.0))
    allowed = _MARGIN * site.floor
    fitted = worst <= _FITTED * site.floor and last <= _MOST_OF_IT * first
    within = bool((worst <= allowed or fitted or last <= 1e-6 * first) and last < 0.5 * first)
    if attempt.hypothesis.grid and not within:
        off = before > allowed
        come = float(np.mean(after[off] <= allowed)) if off.any() else 0.0
        stay = float(np.mean(after[~off] <= allowed)) if (~off).any() else 1.0
        within = stay >= _MOST and ((come >= _MOST and last < 0.8 * first) or last <= _LITTLE * first)
    return Outcome(
        hypothesis=attempt.hypothesis,
        reproduced=within,
        before=float(before.max(initial=0.0)),
        after=worst,
        spread=last / first if first > 0 else 1.0,
    )


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(np.minimum(values, 1e30))))) if len(values) else 0.0


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a dtype, in float64."""
    return values.to(dtype).double()


def place_of(trace: Trace, module: str, direction: str, part: str | None = None) -> Seen | None:
    """One place of a trace."""
    return trace.at(module, direction, part)
