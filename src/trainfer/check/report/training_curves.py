"""Curves as numbers that a template draws: few points, nice ticks, no library.

Takes a series of any length; gives at most ``MAX_POINTS`` buckets (mean, least, largest) and their places in
an SVG of fixed size. Values that are not finite are counted, not drawn. Pure functions of floats.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_POINTS = 500
MAX_MARKS = 40
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 28, 14, 30


def drawable(value: float) -> bool:
    """A finite number far enough from the end of the floats that sums of it stay finite."""
    return abs(value) < 1e300


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Neighbouring steps taken together; one step where there are few."""

    first: int
    last: int
    mean: float
    least: float
    largest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A place on an axis, in SVG units, and what stands there."""

    place: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Something to draw and to read out."""

    x: float
    y: float
    step: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One drawn curve with its axes."""

    line: str
    """SVG path through the points."""
    band: str
    """SVG path around least and largest; empty where each bucket is one step."""
    points: tuple[Point, ...]
    marks: tuple[Point, ...]
    """Further single points: validation."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    not_finite: int


def buckets(steps: Sequence[int], values: Sequence[float], limit: int = MAX_POINTS) -> list[Bucket]:
    """At most ``limit`` buckets of equally many finite values, in order."""
    finite = [index for index, value in enumerate(values) if drawable(value)]
    size = max(1, math.ceil(len(finite) / limit))
    found: list[Bucket] = []
    for start in range(0, len(finite), size):
        inside = finite[start : start + size]
        chosen = [values[index] for index in inside]
        found.append(
            Bucket(
                first=steps[inside[0]],
                last=steps[inside[-1]],
                mean=math.fsum(value / len(chosen) for value in chosen),
                least=min(chosen),
                largest=max(chosen),
            )
        )
    return found


def spread(items: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most ``limit`` of them, evenly, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[round(number * (len(items) - 1) / (limit - 1))] for number in range(limit)]


def linear_curve(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    marks: Sequence[tuple[int, float]] = (),
    from_zero: bool = False,
) -> Curve | None:
    """Mean with a band from least to largest, on a linear axis; None without a finite value."""
    found = buckets(steps, values)
    shown_marks = spread([(step, value) for step, value in marks if drawable(value)], MAX_MARKS)
    if not found:
        return None
    low = min(
        [bucket.least for bucket in found]
        + [value for _, value in shown_marks]
        + ([0.0] if from_zero else [])
    )
    high = max([bucket.largest for bucket in found] + [value for _, value in shown_marks])
    y_values = nice_ticks(low, 1.0 if from_zero and low == high == 0 else high)
    low, high = min(low, y_values[0]), max(high, y_values[-1])
    half_span = high / 2 - low / 2  # halves: no overflow; 0 where both ends are the smallest floats

    def y_of(value: float) -> float:
        share = (value / 2 - low / 2) / half_span if half_span > 0 else 0.5
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    return _assembled(
        found,
        [bucket.mean for bucket in found],
        y_of,
        marks=shown_marks,
        y_ticks=[Tick(place=y_of(value), label=number_text(value)) for value in y_values],
        not_finite=len(values) - sum(map(drawable, values)),
    )


def log_curve(steps: Sequence[int], values: Sequence[float]) -> Curve | None:
    """Largest value of each bucket on a logarithmic axis whose lowest line is exactly zero."""
    found = buckets(steps, values)
    if not found:
        return None
    tops = [max(bucket.largest, 0.0) for bucket in found]
    positive = [value for value in tops if value > 0]
    low = math.floor(math.log10(min(positive))) if positive else -8
    high = max(math.ceil(math.log10(max(positive))) if positive else -4, low + 1)
    zero_line = HEIGHT - BOTTOM
    floor = zero_line - 26

    def y_of(value: float) -> float:
        if value <= 0:
            return zero_line
        return round(floor - (math.log10(value) - low) / (high - low) * (floor - TOP), 1)

    every = max(1, math.ceil((high - low) / 5))
    ticks = [Tick(place=zero_line, label="0")]
    ticks += [Tick(place=y_of(10.0**power), label=f"1e{power}") for power in range(low, high + 1, every)]
    return _assembled(
        found,
        tops,
        y_of,
        marks=(),
        y_ticks=ticks,
        not_finite=len(values) - sum(map(drawable, values)),
        band=False,
    )


def _assembled(
    found: list[Bucket],
    heights: list[float],
    y_of: Callable[[float], float],
    *,
    marks: Sequence[tuple[int, float]],
    y_ticks: Sequence[Tick],
    not_finite: int,
    band: bool = True,
) -> Curve:
    first = min([found[0].first] + [step for step, _ in marks])
    last = max([found[-1].last] + [step for step, _ in marks])

    def x_of(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    middles = [x_of((bucket.first + bucket.last) / 2) for bucket in found]
    points = [
        Point(x=x, y=y_of(value), step=_steps_text(bucket), value=number_text(value))
        for x, value, bucket in zip(middles, heights, found, strict=True)
    ]
    wide = band and any(bucket.largest > bucket.least for bucket in found)
    upper = [f"{x},{y_of(bucket.largest)}" for x, bucket in zip(middles, found, strict=True)]
    lower = [f"{x},{y_of(bucket.least)}" for x, bucket in zip(middles, found, strict=True)]
    return Curve(
        line=_line(points),
        band="M" + " L".join([*upper, *reversed(lower)]) + "Z" if wide else "",
        points=tuple(points),
        marks=tuple(Point(x=x_of(s), y=y_of(v), step=f"step {s}", value=number_text(v)) for s, v in marks),
        x_ticks=tuple(Tick(place=x_of(s), label=f"{s:,}") for s in _step_ticks(first, last)),
        y_ticks=tuple(y_ticks),
        not_finite=not_finite,
    )


def _line(points: list[Point]) -> str:
    if len(points) == 1:  # a dot: a line of no length is not seen
        return f"M{points[0].x - 2},{points[0].y} L{points[0].x + 2},{points[0].y}"
    return "M" + " L".join(f"{point.x},{point.y}" for point in points)


def _steps_text(bucket: Bucket) -> str:
    return (
        f"step {bucket.first:,}"
        if bucket.first == bucket.last
        else f"steps {bucket.first:,} to {bucket.last:,}"
    )


def _step_ticks(first: int, last: int) -> list[int]:
    return sorted({round(value) for value in nice_ticks(first, last) if first <= value <= last} or {first})


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that enclose ``low`` to ``high``, e.g. 0 to 0.93 gives 0, 0.2, 0.4, 0.6, 0.8, 1."""
    if not high > low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = high / wanted - low / wanted
    if raw < 1e-300 or not math.isfinite(raw):
        return [low, high]
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next((scale * nice for nice in (1, 2, 5, 10) if scale * nice >= raw * 0.99), scale * 10)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(start, min(stop, start + 4 * wanted) + 1)]


def number_text(value: float) -> str:
    """Four digits, no exponent where it can be helped; ``0`` only for exactly zero."""
    if value == 0:
        return "0"
    text = f"{value:.4g}"
    if "e" not in text:
        return text
    if 1e-3 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    digits, _, power = f"{value:.3g}".partition("e")
    return f"{digits}e{int(power)}" if power else digits
