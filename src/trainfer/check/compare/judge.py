"""Says of every point whether it agrees, and of every module what it introduced and what it inherited.

Takes raw point results in execution order; gives statuses and modules. Without a replay the error that comes
in is read off the module's captured inputs: a row is *introduced* where its output is further off than the
module itself and its inputs explain, *diverged* also where it is further off than rounding ever is.
Numbers only; the tolerances are data (``tolerance``).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainfer.check.align.names import parent_of
from trainfer.check.align.points import FLOATS
from trainfer.check.compare.records import (
    JoinedRows,
    Metrics,
    ModuleResult,
    PointResult,
    Status,
    worst_of,
)
from trainfer.check.compare.tolerance import Tolerances, layer_of

Errors = NDArray[np.float32]
RunKey = tuple[str, str, int, str]
"""Module, function, occurrence, phase: one use of a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Points with their status; modules in the order of execution; the rows that each point introduced."""

    points: tuple[PointResult, ...]
    modules: tuple[ModuleResult, ...]
    introduced: Mapping[int, NDArray[np.bool_]]
    """Place in ``points`` -> per row, for output points with a row that is introduced or beyond rounding."""


def run_key(result: PointResult) -> RunKey:
    """Which use of which module a point belongs to."""
    point = result.point
    return (point.module, point.function, point.occurrence, point.phase)


def judge(results: Sequence[PointResult], tolerances: Tolerances) -> Judged:
    """Decide all statuses."""
    runs: dict[RunKey, list[PointResult]] = defaultdict(list)
    for result in results:
        runs[run_key(result)].append(result)
    modules = {result.point.module for result in results}
    parents = {ancestor for module in modules for ancestor in _ancestors(module)}
    unit = max((tolerances.unit_of(result.dtypes) for result in results), default=0.0)
    judged: list[PointResult] = []
    introduced: dict[int, NDArray[np.bool_]] = {}
    incoming: dict[RunKey, float] = {}
    for result in results:
        inputs = [r for r in runs[run_key(result)] if r.point.direction == "input" and _explains(r)]
        incoming[run_key(result)] = max((r.worst for r in inputs if np.isfinite(r.worst)), default=0.0)
        bound = _bound(result, tolerances, unit, is_parent=result.point.module in parents)
        takes_floats = any(
            r.point.direction == "input" and r.dtypes[0] in FLOATS for r in runs[run_key(result)]
        )
        fresh = _introduced(result, inputs, bound, takes_floats=takes_floats)
        status = _status(result, bound, fresh)
        if result.point.direction == "output" and status is Status.DIVERGED:
            introduced[len(judged)] = fresh
        tolerance = (
            min(bound.absolute, bound.own + bound.gain * incoming[run_key(result)])
            if inputs
            else bound.absolute
        )
        judged.append(replace(result, status=status, tolerance=tolerance))
    return Judged(points=tuple(judged), modules=_modules(judged, introduced, incoming), introduced=introduced)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """What a row of one point may be off."""

    own: float
    """With equal inputs."""
    gain: float
    """Times the error of its inputs."""
    absolute: float
    """Whatever its inputs."""
    mixes_rows: bool
    """True where earlier rows of the sequence come in too (attention)."""


def _bound(result: PointResult, tolerances: Tolerances, model_unit: float, *, is_parent: bool) -> _Bound:
    if tolerances.unit_of(result.dtypes) == 0.0:
        return _Bound(own=0.0, gain=0.0, absolute=0.0, mixes_rows=False)
    kind = tolerances.composite if is_parent else tolerances.leaf
    unit = max(tolerances.unit_of(result.dtypes), model_unit if is_parent else 0.0)
    width = max((shape[-1] for shape in result.shapes if shape), default=1)
    own = kind.units * unit + kind.sums * tolerances.unit["F32"] * width**0.5
    depth = layer_of(result.point.module) or 0
    absolute = tolerances.absolute_units * model_unit**tolerances.absolute_power
    absolute *= 1 + tolerances.per_layer * depth
    gain = tolerances.composite.gain if _multiplies(result) else kind.gain
    return _Bound(own=own, gain=gain, absolute=max(own, absolute), mixes_rows=is_parent)


def _multiplies(result: PointResult) -> bool:
    """True for an activation of a fused pair: it multiplies gate and up, and where their large values miss one another
    the row is small beside the errors that come in.
    """
    return result.how == "fused" and result.point.module.rpartition(".")[2] == "act_fn"


def _explains(result: PointResult) -> bool:
    """Inputs that carry an error in: floats of known agreement. Positions, ids and masks do not excuse."""
    is_mask = "mask" in result.point.part
    return (
        result.dtypes[0] in FLOATS
        and not is_mask
        and result.status not in (Status.UNMATCHED, Status.UNREADABLE)
        and len(result.errors) > 0
    )


def _introduced(
    result: PointResult, inputs: Sequence[PointResult], bound: _Bound, *, takes_floats: bool
) -> NDArray[np.bool_]:
    """Rows that are further off than the module and its inputs explain; all False where its inputs are unknown.

    A module that takes no floats (embeddings of ids, of positions) has nothing to inherit.
    """
    if bound.own == 0.0:
        return result.errors > 0
    same_rows = [r for r in inputs if len(r.errors) == len(result.errors)]
    if not takes_floats:
        return result.errors > bound.own
    if not same_rows:
        return np.zeros(len(result.errors), dtype=np.bool_)
    came_in = np.max(np.stack([r.errors for r in same_rows]), axis=0)
    if bound.mixes_rows:
        came_in = _earlier_rows_too(came_in, result.rows)
    return result.errors > bound.own + bound.gain * came_in


def _earlier_rows_too(errors: Errors, rows: JoinedRows | None) -> Errors:
    """For each row the largest error among the rows of its sequence up to it."""
    if rows is None or len(rows) != len(errors) or (rows.labels < 0).any():
        return np.full_like(errors, errors.max(initial=0.0))
    order = np.lexsort((rows.positions, rows.labels))
    result = np.empty_like(errors)
    edges = np.flatnonzero(np.diff(rows.labels[order])) + 1
    for part in np.split(order, edges):
        result[part] = np.maximum.accumulate(errors[part])
    return result


def _status(result: PointResult, bound: _Bound, fresh: NDArray[np.bool_]) -> Status:
    if result.status in (Status.UNMATCHED, Status.UNREADABLE):
        return result.status
    metrics = result.metrics
    if metrics.nan_rollout or metrics.nan_train or metrics.nan_both:
        return Status.DIVERGED
    if not result.errors.any():
        same_dtype = result.dtypes[0] == result.dtypes[1]
        return Status.EQUAL if same_dtype else Status.ROUNDING
    if result.point.direction == "input":
        return Status.DIVERGED if result.worst > bound.absolute else Status.ROUNDING
    return Status.DIVERGED if fresh.any() or result.worst > bound.absolute else Status.ROUNDING


def _ancestors(module: str) -> list[str]:
    names: list[str] = []
    while module:
        module = parent_of(module)
        names.append(module)
    return names


def module_label(result: PointResult) -> str:
    """What a report calls the owner of a point: the module, a function within it, its gradient."""
    point = result.point
    label = f"{point.module}::{point.function}" if point.function else point.module
    return label if point.phase == "forward" else f"{label} ({point.phase})"


def _modules(
    points: Sequence[PointResult],
    introduced: Mapping[int, NDArray[np.bool_]],
    incoming: Mapping[RunKey, float],
) -> tuple[ModuleResult, ...]:
    grouped: dict[str, list[int]] = defaultdict(list)
    for place, result in enumerate(points):
        if result.point.direction == "output":
            grouped[module_label(result)].append(place)
    modules: list[ModuleResult] = []
    for label, places in grouped.items():
        outputs = [points[place] for place in places]
        status = worst_of([result.status for result in outputs])
        metrics = Metrics()
        for result in outputs:
            metrics = metrics.plus(result.metrics)
        fresh = [
            float(points[place].errors[introduced[place]].max(initial=0.0))
            for place in places
            if place in introduced
        ]
        notes = dict.fromkeys(note for result in outputs for note in result.notes)
        if metrics.nan_both:
            notes[f"{metrics.nan_both} elements are NaN on both sides: not compared, and not equal"] = None
        if metrics.nan_rollout or metrics.nan_train:
            text = (
                f"NaN or infinite on one side only: rollout {metrics.nan_rollout}, train {metrics.nan_train}"
            )
            notes[text] = None
        modules.append(
            ModuleResult(
                module=label,
                status=status,
                rows=max(len(result.errors) for result in outputs),
                metrics=metrics,
                introduced=max(fresh, default=0.0),
                inherited=max(incoming.get(run_key(result), 0.0) for result in outputs),
                tolerance=max(result.tolerance for result in outputs),
                how=outputs[0].how,
                order=min(result.order for result in outputs),
                notes=tuple(notes),
            )
        )
    return tuple(sorted(modules, key=lambda module: module.order))
