"""One side's points while partners for them are sought.

Takes what ``points`` collected; gives a place where points are made of others, taken away, and looked up.
"""

from collections.abc import Sequence
from dataclasses import replace

from trainfer.check.align.names import parent_of
from trainfer.check.align.points import Point, SidePoints, Source

Sources = dict[Point, tuple[Source, ...]]


class SideWork:
    """A side's points while partners are sought."""

    def __init__(self, side: SidePoints) -> None:
        self.sources: Sources = dict(side.sources)
        self.extra: Sources = dict(side.extra)
        self.order = dict(side.order)
        self.used: set[Point] = set()
        """Points that were turned into others."""
        self.modules = {point.module for point in side.sources}
        self.parents = {parent_of(module) for module in self.modules}

    def add(self, point: Point, sources: tuple[Source, ...], *, after: Point) -> None:
        """A point made of others."""
        self.sources[point] = sources
        self.order[point] = self.order.get(after, 0)
        self.used.add(after)

    def forget(self, module: str, *, occurrence: int | None = None) -> None:
        """Leave out a module whose values went elsewhere."""
        for point in [p for p in (*self.sources, *self.extra) if p.module == module]:
            if occurrence is None or point.occurrence == occurrence:
                self.used.add(point)
                self.sources.pop(point, None)
                self.extra.pop(point, None)


def changed(point: Point, **changes: object) -> Point:
    """The same point but for some fields."""
    return replace(point, **changes)  # pyright: ignore[reportArgumentType]


def by_call(sources: Sequence[Source]) -> dict[tuple[int, int], Source]:
    """(rank, call) -> source."""
    return {(source.rank, source.call): source for source in sources}
