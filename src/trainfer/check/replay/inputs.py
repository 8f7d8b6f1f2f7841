"""What a side captured of a module, in terms of the model's own module of that name.

Takes both sides put together; gives the sources of a place on one side: as the side's module itself gave them where
it is of the model's kind, else as the adapters describe them (a part of a fused projection, a residual pair's sum).
"""

from collections.abc import Callable, Mapping

from trainfer.check.align.names import canonical
from trainfer.check.align.points import Point, Source
from trainfer.check.compare.joined import JoinedSides
from trainfer.check.replay.rows import by_call

LABELS = ("rollout", "train")


class Captured:
    """One side's places; ``side`` is 0 for the rollout, 1 for training."""

    def __init__(
        self,
        joined: JoinedSides,
        side: int,
        kinds: Mapping[str, str],
        *,
        is_proven: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Index one side.

        Args:
            joined: Both sides.
            side: 0 or 1.
            kinds: Classes of the model's modules.
            is_proven: True where a module's weight lies in the fused one as it was expected to.
        """
        self.side = side
        self._is_proven = is_proven
        self.label = LABELS[side]
        self._points = joined.points[side]
        self._pairs = {pair.point: pair for pair in joined.join.pairs}
        self._kinds = kinds
        self._by_call: dict[Point, dict[tuple[int, int], Source]] = {}
        self._special = {rule.module for rule in joined.names.output_is_input_of}
        entries = joined.sides[side].manifest.modules
        self._own_kinds = {canonical(entry.name, joined.names): entry.kind for entry in entries}

    def sources(self, point: Point) -> tuple[Source, ...]:
        """What holds a place; empty where nothing does."""
        own = self._points.sources.get(point) or self._points.extra.get(point) or ()
        pair = self._pairs.get(point)
        made = () if pair is None else (pair.rollout, pair.train)[self.side]
        if pair is not None and pair.how == "residual":
            return made
        if pair is not None and pair.other_layouts and pair.fused_side == self.label:
            return made if self._is_proven(point.module) else ()
        if own and self._is_same_kind(point.module):
            return own
        if point.module.rpartition(".")[2] in self._special:
            return made if pair is not None and pair.how == "name" else ()
        if point.module.endswith("rotary_emb"):
            return ()
        return made or own

    def by_call(self, point: Point) -> dict[tuple[int, int], Source]:
        """(rank, call) -> source."""
        if point not in self._by_call:
            self._by_call[point] = by_call(self.sources(point))
        return self._by_call[point]

    def _is_same_kind(self, module: str) -> bool:
        kind = self._kinds.get(module)
        own = self._own_kinds.get(module)
        return kind is None or own is None or kind == own


def place(module: str, direction: str, part: str, occurrence: int = 0) -> Point:
    """A module's forward point."""
    return Point(
        module=module, function="", occurrence=occurrence, phase="forward", direction=direction, part=part
    )
