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
from trainfer.plan.construct import constructed
from trainfer.plan.cures import cures, has_cure
from trainfer.plan.records import Problem, Value

Rule = Callable[[Asked], Iterator[Problem]]
Changes = Mapping[str, Value]

MAX_STATES = 120
MAX_MORE = 60
"""States looked at after the first suggestion."""
MAX_KEYS = 5
SCAN = 32

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

_LAST_RESORT = (keys.N,)
"""Moved only where no other key of a problem cures it."""


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
    states = MAX_STATES
    while queue and states and len(found) < wanted:
        states -= 1
        _, _, changes = heapq.heappop(queue)
        here = asked.with_values(changes) if changes else asked
        problem = next(filter(needs_cure, run_rules(rules, here)), None)
        if problem is None:
            if changes:
                states = min(states, MAX_MORE) if not found else states
                found.append(changes)
            continue
        for move in _moves(here, problem, rules):
            merged = _merged(asked, changes, move)
            mark = frozenset(merged.items())
            if mark not in seen and len(merged) <= MAX_KEYS:
                seen.add(mark)
                heapq.heappush(queue, (_cost(asked, merged), len(seen), merged))
    return found or _built(asked, rules)[:wanted]


def _built(asked: Asked, rules: Sequence[Rule]) -> list[dict[str, Value]]:
    """Whole sets of sizes that are legal, nearest first."""
    sets = [_merged(asked, {}, changes) for changes in constructed(asked)]
    legal = [
        changes
        for changes in sets
        if changes and not any(map(needs_cure, run_rules(rules, asked.with_values(changes))))
    ]
    return sorted(legal, key=lambda changes: _cost(asked, changes))


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
        if isinstance(old, int) and isinstance(new, int) and _is_count(old) and _is_count(new):
            odd = 0.5 if key in _POWERS_OF_TWO and new & (new - 1) else 0.0
            total += odd + _WEIGHTS.get(key, 0.3) * (0.05 + abs(math.log(new) - math.log(old)))
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
    movable = [key for key in problem.keys if key in _WEIGHTS and key not in asked.unknown]
    tried = 0
    for key in sorted(movable, key=lambda key: key in _LAST_RESORT):
        value = asked.values.get(key)
        if (tried and key in _LAST_RESORT) or not isinstance(value, int) or not _is_count(value):
            continue
        for candidate in _nearby(asked, key, value, problem.code, broken):
            tried += 1
            yield {key: candidate}


def _nearby(asked: Asked, key: str, value: int, code: str, broken: Sequence[Rule]) -> Iterator[int]:
    """The two nearest values on each side with which the broken rules are content."""

    def content(candidate: int) -> bool:
        there = asked.with_values({key: candidate})
        return not any(problem.code == code for rule in broken for problem in _run(rule, there))

    near = range(max(1, value - SCAN), value + SCAN + 1)
    candidates = sorted({*near, *_multiples(asked, value)} - {value})
    for side in ([c for c in reversed(candidates) if c < value], [c for c in candidates if c > value]):
        good = 0
        for candidate in side:
            if content(candidate):
                yield candidate
                good += 1
                if good == 2:
                    break


def _multiples(asked: Asked, value: int) -> Iterator[int]:
    """Multiples, up to four on each side, of the sizes that usually have to divide; and fractions of those."""
    sizes = (
        asked.values.get(key)
        for key in (keys.TRAIN, keys.MINI, keys.MICRO, keys.LOG_PROB, keys.GPUS, keys.GEN)
    )
    for size in sizes:
        if not isinstance(size, int) or size < 2:
            continue
        first = value // size - 3
        yield from (size * factor for factor in range(max(1, first), first + 8))
        yield from (size // part for part in range(1, 9) if size % part == 0)
