"""Statuses from a replay: what a module introduced, against its measured noise floor.

Takes what the comparison judged by its coarse tolerances and a replay; gives it judged again. A module that introduces
more than its floor on either side is diverged; one that does not is within rounding as long as no module before it
diverged, however far its inherited rounding has grown; behind such a module, and where not all rows were replayed (their
weights are not the model's), the first judgement stands.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainfer.check.compare.judge import Judged, module_label
from trainfer.check.compare.records import ModuleResult, PointResult, Status
from trainfer.check.replay.records import ModuleReplay, Replay


def judge_again(judged: Judged, replay: Replay) -> Judged:
    """The same points and modules, with the replay's numbers where there are some."""
    by_module = {module.module: module for module in replay.modules}
    first = min((m.order for m in replay.modules if is_beyond(m)), default=None)
    partly = {
        result.point.module
        for result in judged.points
        if _is_result(result)
        and result.point.module in by_module
        and len(result.errors) > len(by_module[result.point.module].introduced_rollout)
    }
    chosen = {
        result.point.module
        for result in judged.points
        if result.point.part == "index" and _chooses_otherwise(result, by_module.get(result.point.module))
    }
    modules = tuple(
        module
        if module.module in chosen
        else _module(module, by_module.get(module.module), first, partly=module.module in partly)
        for module in judged.modules
    )
    statuses = {module.module: module for module in modules}
    points: list[PointResult] = []
    introduced: dict[int, NDArray[np.bool_]] = {}
    for place, result in enumerate(judged.points):
        found = by_module.get(result.point.module)
        if not _is_result(result) or found is None:
            points.append(_input(result, by_module, first))
            if place in judged.introduced:
                introduced[place] = judged.introduced[place]
            continue
        module = statuses[module_label(result)]
        if result.point.module in partly and not is_beyond(found):
            points.append(result)
            if place in judged.introduced:
                introduced[place] = judged.introduced[place]
            continue
        points.append(replace(result, status=_point_status(result, module), tolerance=module.tolerance))
        if points[-1].status is Status.DIVERGED:
            introduced[place] = _rows(found, len(result.errors))
    return Judged(points=tuple(points), modules=modules, introduced=introduced)


def is_beyond(module: ModuleReplay) -> bool:
    """It introduces more than rounding on one side or the other."""
    return max(module.factors) > 1.0


def _chooses_otherwise(result: PointResult, found: ModuleReplay | None) -> bool:
    """Other experts from the same scores: where scores differ by rounding, near ties flip in a row here and there."""
    if found is None or result.point.direction != "output" or result.status is not Status.DIVERGED:
        return False
    if len(found.difference) != len(result.errors):
        return False
    same = found.difference <= min(floor.value for floor in found.floors)
    flipped = same & (result.errors > 0)
    return int(flipped.sum()) >= 2 and float(flipped.sum()) > _TIES * float(same.sum())


_TIES = 0.2
"""Of the rows with equal scores: so many have a near tie at most."""


def _is_result(result: PointResult) -> bool:
    point = result.point
    return (
        point.direction == "output"
        and point.phase == "forward"
        and not point.function
        and point.part != "index"
        and result.status not in (Status.UNMATCHED, Status.UNREADABLE)
    )


def _module(
    module: ModuleResult, found: ModuleReplay | None, first: int | None, *, partly: bool
) -> ModuleResult:
    if partly and found is not None and not is_beyond(found):
        found = None
    if found is None or module.status in (Status.UNMATCHED, Status.UNREADABLE):
        return module
    notes = module.notes
    if found.place != "output":
        notes = (*notes, f"replayed: what it introduces shows at {found.place}")
    return replace(
        module,
        status=_status(module, found, first),
        introduced=float(
            max(found.introduced_rollout.max(initial=0.0), found.introduced_train.max(initial=0.0))
        ),
        inherited=float(found.inherited.max(initial=0.0)),
        tolerance=max(floor.value for floor in found.floors),
        notes=notes,
    )


def _status(module: ModuleResult, found: ModuleReplay, first: int | None) -> Status:
    if module.metrics.nan_rollout or module.metrics.nan_train or module.metrics.nan_both:
        return Status.DIVERGED
    if is_beyond(found):
        return Status.DIVERGED
    if module.status is Status.DIVERGED and (first is None or found.order < first):
        return Status.ROUNDING
    return module.status


def _point_status(result: PointResult, module: ModuleResult) -> Status:
    if not result.errors.any() and result.status is not Status.DIVERGED:
        return result.status
    return module.status


def _input(result: PointResult, by_module: Mapping[str, ModuleReplay], first: int | None) -> PointResult:
    """An input that is off by inherited rounding only."""
    found = by_module.get(result.point.module)
    is_input = (
        result.point.direction == "input" and result.point.phase == "forward" and not result.point.function
    )
    before = found is not None and (first is None or found.order < first)
    if is_input and before and result.status is Status.DIVERGED and np.isfinite(result.worst):
        return replace(result, status=Status.ROUNDING)
    return result


def _rows(found: ModuleReplay, count: int) -> NDArray[np.bool_]:
    """Rows in which one side introduces more than its floor; none where the module only inherits."""
    if len(found.introduced_rollout) != count:
        return np.zeros(count, dtype=np.bool_)
    first, second = (floor.value for floor in found.floors)
    return (found.introduced_rollout > first) | (found.introduced_train > second)
