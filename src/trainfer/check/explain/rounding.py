"""Causes of rounding size: sums in another order, and another precision of one whole side.

Takes a comparison; gives causes for projections that were given the same bits and gave others back, and for a model whose
projections all have another dtype on one side. Rounding it is, but it has a reason: other batch shapes, sums that are cut over
ranks, a coarser dtype. Only rows with equal inputs count for an order of sums, so nothing that came in is taken for it.
"""

from collections.abc import Mapping

import numpy as np

from trainfer.check.compare.records import Comparison, PointResult, Status
from trainfer.check.explain.fixes import make_cause
from trainfer.check.explain.records import Cause

_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "dense_4h_to_h", "fc2", "w2", "wo")
"""Projections whose sums tensor-parallel ranks share."""
_COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj", "fc1", "w1", "w3")  # fmt: skip
_MIN_ROWS = 4
_MIN_PROJECTIONS = 4


def rounding_causes(comparison: Comparison) -> list[Cause]:
    """At most one: the order of sums in projections, where no module diverged."""
    if comparison.stage("modules").status is not Status.ROUNDING:
        return []
    changed = _changed(comparison)
    rows = {name: counts for name, counts in changed.items() if counts[0]}
    cut = [name for name in rows if name.rpartition(".")[2] in _ROW_PARALLEL]
    whole = [name for name in changed if name.rpartition(".")[2] in _COLUMN_PARALLEL]
    exact = [name for name in whole if not changed[name][0]]
    if cut and whole and len(exact) == len(whole) and set(rows) <= set(cut):
        text = f"{len(cut)} projections whose sums ranks share give other bits from the same input, e.g. {cut[0]} "
        text += f"({rows[cut[0]][0]} of {rows[cut[0]][1]} rows); all {len(exact)} projections with whole sums are bitwise equal"
        return [_made("shape.parallel", cut[0], tuple(cut), text)]
    if rows and not any(result.status is not Status.EQUAL for result in comparison.repeated):
        first = next(iter(rows))
        text = f"{len(rows)} projections give other bits from the same input, e.g. {first} in {rows[first][0]} of "
        text += f"{rows[first][1]} rows: their sums were taken in another order, as other batch shapes do"
        return [_made("shape.batch", first, tuple(rows), text)]
    return []


def dtype_causes(comparison: Comparison) -> list[Cause]:
    """At most one: all projections of the model compute in another dtype on one side. Read from the dumps, so it is proven."""
    if comparison.stage("modules").status is not Status.ROUNDING:
        return []
    outputs = sorted(filter(_is_projected, comparison.points), key=lambda result: result.order)
    modules = tuple(dict.fromkeys(result.point.module for result in outputs))
    pairs = {result.dtypes for result in outputs}
    if len(modules) < _MIN_PROJECTIONS or len(pairs) != 1:
        return []
    ((rollout, train),) = pairs
    if rollout == train:
        return []
    text = f"all {len(modules)} projections give {rollout} in the rollout and {train} in training: the coarser dtype explains "
    text += "differences of this size, and hides any other cause as small"
    return [
        make_cause(
            "module.dtype",
            stage="modules",
            module=modules[0],
            confirmed=True,
            evidence=(text,),
            modules=modules,
        )
    ]


def _is_projected(result: PointResult) -> bool:
    point = result.point
    leaf = point.module.rpartition(".")[2]
    is_output = point.direction == "output" and point.phase == "forward" and not point.function
    return is_output and leaf in (*_ROW_PARALLEL, *_COLUMN_PARALLEL)


def _made(cause: str, module: str, modules: tuple[str, ...], text: str) -> Cause:
    return make_cause(
        cause, stage="modules", module=module, confirmed=False, evidence=(text,), modules=modules
    )


def _changed(comparison: Comparison) -> Mapping[str, tuple[int, int]]:
    """Projection -> (rows with equal input and another output, rows with equal input), in the order of execution."""
    inputs: dict[tuple[str, int], PointResult] = {}
    outputs: dict[tuple[str, int], PointResult] = {}
    for result in sorted(comparison.points, key=lambda item: item.order):
        point = result.point
        leaf = point.module.rpartition(".")[2]
        if point.phase != "forward" or point.function or leaf not in (*_ROW_PARALLEL, *_COLUMN_PARALLEL):
            continue
        if result.how == "name" and point.part in ("input", "output"):
            (inputs if point.direction == "input" else outputs)[point.module, point.occurrence] = result
    found: dict[str, tuple[int, int]] = {}
    for key, output in outputs.items():
        given = inputs.get(key)
        if given is None or len(given.errors) != len(output.errors) or output.dtypes[0] != output.dtypes[1]:
            continue
        same = given.errors == 0
        off, count = int(np.count_nonzero(output.errors[same])), int(np.count_nonzero(same))
        if count >= _MIN_ROWS:
            before = found.get(key[0], (0, 0))
            found[key[0]] = (before[0] + off, before[1] + count)
    return found
