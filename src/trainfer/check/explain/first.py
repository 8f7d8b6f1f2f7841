"""Where the two sides part ways first.

Takes a comparison; gives the first stage that diverged and, within it, the first module in the order of
execution that is further off than its own inputs explain. A module that contains the fault, or comes after it,
inherits it and is not first. Where a replay is at hand, it decides: the first module that introduces more than its
measured floor on either side.
"""

import numpy as np
from numpy.typing import NDArray

from trainfer.check.compare.records import (
    Comparison,
    JoinedRows,
    PointResult,
    Status,
    TokenFinding,
    WeightFinding,
)
from trainfer.check.explain.records import FirstDivergence, Token
from trainfer.check.replay.records import Replay


def first_divergence(comparison: Comparison, replay: Replay | None = None) -> FirstDivergence | None:
    """The first divergence, or None where no stage diverged."""
    for stage in comparison.stages:
        if stage.status is Status.DIVERGED:
            found = _in_replay(replay) if stage.name == "modules" and replay is not None else None
            if found is None or replay is None:
                return _IN_STAGE[stage.name](comparison)
            return _not_replayed(found, replay, comparison) or found
    return None


def _not_replayed(found: FirstDivergence, replay: Replay, comparison: Comparison) -> FirstDivergence | None:
    """A module that no replay reached and that is off by itself where the two sides meet: a part of the one found, or before it."""
    direct = _in_modules(comparison)
    replayed = {item.module for item in replay.modules}
    if direct.module is None or found.module is None or direct.module in replayed:
        return None
    last = len(replay.order)
    is_part = direct.module.startswith(f"{found.module}.")
    is_before = replay.order.get(direct.module, last) < replay.order.get(found.module, last)
    return direct if is_part or is_before else None


def _in_replay(replay: Replay) -> FirstDivergence | None:
    """The first module that introduces more than its floor, with the rows that do."""
    for item in sorted(replay.modules, key=lambda module: module.order):
        if not max(item.factors) > 1:
            continue
        off = (item.introduced_rollout > item.floors[0].value) | (
            item.introduced_train > item.floors[1].value
        )
        rows = item.rows
        usable = rows is not None and len(rows) == len(off)
        return FirstDivergence(
            stage="modules",
            module=item.module,
            tokens=_named(rows, off) if rows is not None and usable else (),
            pass_name=_first_pass(rows, off) if rows is not None and usable else None,
        )
    return None


def _in_tokens(comparison: Comparison) -> FirstDivergence:
    tokens = [token for finding in comparison.tokens for token in finding_tokens(finding)]
    tokens = sorted(dict.fromkeys(tokens))
    return FirstDivergence(
        stage="tokens", module=None, tokens=tuple(tokens), pass_name=_pass_of(comparison, tokens)
    )


def finding_tokens(finding: TokenFinding) -> list[Token]:
    """Positions of the rollout's sequence that differ; of an insertion the place where it stands."""
    if not finding.edits and finding.first is not None:
        first = finding.first
        start = len(first.tokens) - 1 if "last token" in finding.note else first.prompt_length
        return [(finding.sequence, position) for position in range(start, len(first.tokens))]
    return [
        (finding.sequence, position)
        for edit in finding.edits
        for position in range(edit.first_start, max(edit.first_stop, edit.first_start + 1))
    ]


def _pass_of(comparison: Comparison, tokens: list[Token]) -> str | None:
    if not tokens or not 0 <= tokens[0][0] < len(comparison.rollout_sequences):
        return None
    sequence, position = tokens[0]
    return "prefill" if position < comparison.rollout_sequences[sequence].prompt_length else "decode"


def first_weight(comparison: Comparison) -> WeightFinding | None:
    """The finding whose module runs first."""
    last = len(comparison.weights_order)
    order = {module: comparison.weights_order.get(module, last) for module in _modules_of(comparison)}
    return min(comparison.weights, key=lambda finding: order[finding.module], default=None)


def _modules_of(comparison: Comparison) -> set[str]:
    return {finding.module for finding in comparison.weights}


def _in_weights(comparison: Comparison) -> FirstDivergence:
    finding = first_weight(comparison)
    if finding is None:
        return FirstDivergence(stage="weights", module=None, tokens=(), pass_name=None)
    touched = [
        (result, result.errors > 0)
        for result in comparison.points
        if result.point.module == finding.module
        and result.point.direction == "output"
        and result.point.phase == "forward"
        and result.rows is not None
        and result.errors.any()
    ]
    tokens, pass_name = _tokens_of(*touched[0]) if touched else ((), None)
    return FirstDivergence(stage="weights", module=finding.module, tokens=tokens, pass_name=pass_name)


def first_point(comparison: Comparison) -> tuple[PointResult, NDArray[np.bool_]] | None:
    """The first output that is off by itself, with its rows; where inputs are not known, the first that is off."""
    for place in sorted(comparison.introduced, key=lambda place: comparison.points[place].order):
        if comparison.introduced[place].any():
            return comparison.points[place], comparison.introduced[place]
    off = [
        result
        for result in comparison.points
        if result.status is Status.DIVERGED and result.point.direction == "output"
    ]
    if not off:
        return None
    result = min(off, key=lambda item: item.order)
    return result, (result.errors > result.tolerance) | ~np.isfinite(result.errors)


def _in_modules(comparison: Comparison) -> FirstDivergence:
    found = first_point(comparison)
    if found is None:
        return FirstDivergence(stage="modules", module=None, tokens=(), pass_name=None)
    tokens, pass_name = _tokens_of(*found)
    return FirstDivergence(stage="modules", module=found[0].point.module, tokens=tokens, pass_name=pass_name)


def _tokens_of(result: PointResult, off: NDArray[np.bool_]) -> tuple[tuple[Token, ...], str | None]:
    rows = result.rows
    if rows is None or len(rows) != len(off):
        return (), None
    return _named(rows, off), _first_pass(rows, off)


def _named(rows: JoinedRows, off: NDArray[np.bool_]) -> tuple[Token, ...]:
    places = np.flatnonzero(off & (rows.labels >= 0))
    pairs = zip(rows.labels[places].tolist(), rows.positions[places].tolist(), strict=True)
    return tuple(sorted({(int(label), int(position)) for label, position in pairs}))


def _first_pass(rows: JoinedRows, off: NDArray[np.bool_]) -> str | None:
    places = np.flatnonzero(off)
    if not len(places):
        return None
    first = places[np.lexsort((rows.positions[places], rows.labels[places]))[0]]
    return rows.pass_names[int(rows.passes[first])]


def _in_logprobs(comparison: Comparison) -> FirstDivergence:
    result = comparison.logprobs
    assert result is not None, "a log-prob stage that diverged has log-probs"
    off = ~(np.abs(result.difference) <= result.allowed)
    if not off.any():
        off = result.difference != 0
    pairs = zip(result.labels[off].tolist(), result.positions[off].tolist(), strict=True)
    tokens = sorted({(int(label), int(position)) for label, position in pairs})
    return FirstDivergence(
        stage="logprobs", module=None, tokens=tuple(tokens), pass_name=_pass_of(comparison, tokens)
    )


def _in_batch_shape(comparison: Comparison) -> FirstDivergence:
    result = next(result for result in comparison.repeated if result.status is Status.DIVERGED)
    tokens, pass_name = _tokens_of(result, result.errors > 0)
    return FirstDivergence(
        stage="batch_shape", module=result.point.module, tokens=tokens, pass_name=pass_name
    )


_IN_STAGE = {
    "tokens": _in_tokens,
    "weights": _in_weights,
    "modules": _in_modules,
    "logprobs": _in_logprobs,
    "batch_shape": _in_batch_shape,
}
