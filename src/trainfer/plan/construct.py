"""A legal plan built from the top down, for when small repairs of single keys find none.

Mini-batch first (whole sequences on every rank), then the step (whole mini-batches), then each
micro-batch size as the divisor nearest to what was asked.
"""

import math
from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown
from trainfer.plan.records import Value
from trainfer.plan.verl_sizes import data_parallel, gpus


def constructed(asked: Asked) -> Iterator[dict[str, Value]]:
    """A few complete sets of sizes near those asked for; the caller checks them against the rules."""
    try:
        samples, ranks, world = asked.count(keys.N, 1), data_parallel(asked), gpus(asked)
        mini, prompts = asked.count(keys.MINI, 256), asked.count(keys.TRAIN, 1024)
    except NotKnown:
        return
    step = math.lcm(ranks, world) // math.gcd(samples, math.lcm(ranks, world))
    lower = mini // step
    for factor in sorted({lower, lower + 1, lower + 2} - {0}):
        new_mini = factor * step
        for times in sorted({max(1, prompts // new_mini), prompts // new_mini + 1}):
            yield _sized(asked, new_mini, new_mini * times, samples, ranks)


def _sized(asked: Asked, mini: int, prompts: int, samples: int, ranks: int) -> dict[str, Value]:
    changes: dict[str, Value] = {keys.MINI: mini, keys.TRAIN: prompts}
    for key, rows in (
        (keys.MICRO, mini * samples // ranks),
        (keys.LOG_PROB, prompts * samples // ranks),
        (keys.REF, prompts * samples // ranks),
    ):
        wanted = asked.values.get(key)
        if isinstance(wanted, int) and wanted > 0:
            changes[key] = _nearest_divisor(rows, wanted)
    return changes


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(_divisors(number), key=lambda size: (abs(math.log(size / wanted)), size))


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(min(number, 10**8)) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
