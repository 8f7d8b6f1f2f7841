"""Overrides that make a plan legal: a small best-first search over nearby values.

From the sizes that were asked for, the first problem is cured by changing one of its keys to a
nearby value that satisfies the very rule that was broken; then the next problem is looked at, until
no rule is broken and nothing silent is left. Nearest first: relative change, plus a little for every
key that changes. The number of GPUs is never changed, and the number of samples per prompt rarely.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown
from trainfer.plan.cures import cures, has_cure
from trainfer.plan.records import Problem, Value

Rule = Callable[[Asked], Iterator[Problem]]
Changes = Mapping[str, Value]

MAX_STATES = 60
MAX_KEYS = 5
SCAN = 2048

_WEIGHTS = {
    keys.TRAIN: 1.1,
    keys.MINI: 1.0,
    keys.MICRO: 1.0,
    keys.LOG_PROB: 0.6,
    keys.REF: 0.6,
    keys.GEN: 0.5,
    keys.WORKERS: 0.3,
    keys.TP: 1.0,
    keys.ROLLOUT_DP: 2.0,
    keys.SP: 2.0,
    keys.SYNC_EVERY: 1.0,
    keys.N: 6.0,
}
"""Whole-number keys that may move, and how dear it is: what changes the training most costs most."""

_POWERS_OF_TWO = (keys.TP, keys.SP, keys.ROLLOUT_DP)
"""Sizes that usually divide a model's heads only as powers of two."""


def run_rules(rules: Sequence[Rule], asked: Asked) -> list[Problem]:
    """Every problem of every rule; rules that need a value which is not known say nothing."""
    found: list[Problem] = []
    for rule in rules:
        found.extend(_run(rule, asked))
    return found


def _run(rule: Rule, asked: Asked) -> list[Problem]:
    try:
        return list(rule(asked))
    except NotKnown:
        return []


def needs_cure(problem: Problem) -> bool:
    """True for what a suggestion must not leave behind."""
    return problem.severity == "error" or problem.when == "silent"


def suggest(asked: Asked, rules: Sequence[Rule], *, wanted: int = 3) -> list[dict[str, Value]]:
    """Up to ``wanted`` sets of overrides, nearest first; each leaves no error and nothing silent."""
    found: list[dict[str, Value]] = []
    queue: list[tuple[float, int, dict[str, Value]]] = [(0.0, 0, {})]
    seen: set[frozenset[tuple[str, Value]]] = {frozenset()}
    for _ in range(MAX_STATES):
        if not queue or len(found) == wanted:
            break
        _, _, changes = heapq.heappop(queue)
        here = asked.with_values(changes) if changes else asked
        problem = next(filter(needs_cure, run_rules(rules, here)), None)
        if problem is None:
            if changes:
                found.append(changes)
            continue
        for move in _moves(here, problem, rules):
            merged = _merged(asked, changes, move)
            mark = frozenset(merged.items())
            if mark not in seen and len(merged) <= MAX_KEYS:
                seen.add(mark)
                heapq.heappush(queue, (_cost(asked, merged), len(seen), merged))
    return found


def _merged(asked: Asked, changes: Changes, move: Changes) -> dict[str, Value]:
    """Both together; a key that is back where it was does not count as changed."""
    merged = {**changes, **move}
    return {
        key: value
        for key, value in merged.items()
        if key in asked.unknown or key not in asked.values or asked.values[key] != value
    }


def _cost(asked: Asked, changes: Changes) -> float:
    total = 0.0
    for key, new in changes.items():
        old = asked.values.get(key)
        if _is_count(old) and _is_count(new):
            odd = 0.5 if key in _POWERS_OF_TWO and int(new) & (int(new) - 1) else 0.0  # pyright: ignore[reportArgumentType]
            total += odd + _WEIGHTS.get(key, 0.3) * (0.05 + abs(math.log(float(new) / float(old))))  # pyright: ignore[reportArgumentType]
        else:
            total += 0.02 if new is None else 0.3
    return total


def _is_count(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _moves(asked: Asked, problem: Problem, rules: Sequence[Rule]) -> Iterator[Changes]:
    yield from cures(asked, problem)
    if has_cure(problem.code):
        return
    broken = [rule for rule in rules if any(other.code == problem.code for other in _run(rule, asked))]
    for key in problem.keys:
        value = asked.values.get(key)
        if key in _WEIGHTS and key not in asked.unknown and isinstance(value, int) and _is_count(value):
            for candidate in _nearby(asked, key, value, problem.code, broken):
                yield {key: candidate}


def _nearby(asked: Asked, key: str, value: int, code: str, broken: Sequence[Rule]) -> Iterator[int]:
    """The three nearest values on each side with which the broken rules are content."""

    def content(candidate: int) -> bool:
        there = asked.with_values({key: candidate})
        return not any(problem.code == code for rule in broken for problem in _run(rule, there))

    for candidates in (
        range(value - 1, max(0, value - SCAN), -1),
        range(value + 1, value + min(SCAN, 2 * value + 64)),
    ):
        good = 0
        for candidate in candidates:
            if content(candidate):
                yield candidate
                good += 1
                if good == 3:
                    break
