"""Makes points of two unlike models meet: fused projections, residual pairs, rotary modules, shards.

Takes both sides' points; gives pairs, each saying how it was matched, and the points that have no partner.
Modules are matched by what they compute: a fused ``qkv_proj`` gives the three outputs that the other side
has apart; a layer that returns ``(hidden, residual)`` gives their sum where the other returns one tensor; an
``act_fn`` that takes the fused pair gives what ``down_proj`` takes. Reshaping is described here as columns
and sums, and done by ``compare.values``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainfer.check.align.layouts import columns
from trainfer.check.align.names import NameMap, sibling
from trainfer.check.align.points import Columns, Op, Point, SidePoints, Source
from trainfer.check.align.rotary import rotate
from trainfer.check.align.work import SideWork, by_call, changed


@dataclass(frozen=True, kw_only=True, slots=True)
class PointPair:
    """One point with what either side has of it."""

    point: Point
    rollout: tuple[Source, ...]
    train: tuple[Source, ...]
    how: str
    """``name``, ``fused``, ``residual``, ``rotary``, ``input``: what was done to make them meet."""
    order: int
    """Rises with execution."""
    other_layouts: tuple[tuple[Columns, ...], ...] = ()
    """Other places where the part may lie in a fused output; tried where the first does not fit."""
    fused_side: str = ""
    """The side whose columns ``other_layouts`` replaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PointJoin:
    """Everything that was captured: in pairs, or named as having no partner."""

    pairs: tuple[PointPair, ...]
    rollout_only: tuple[Point, ...]
    train_only: tuple[Point, ...]


def join_points(
    rollout: SidePoints, train: SidePoints, names: NameMap, *, head_size: int | None = None
) -> PointJoin:
    """Pair the points of two sides; ``head_size`` is that of the keys, for layouts that go by heads."""
    a, b = SideWork(rollout), SideWork(train)
    how: dict[Point, str] = {}
    layouts: dict[Point, tuple[str, tuple[tuple[Columns, ...], ...]]] = {}
    for ours, theirs, side in ((a, b, "rollout"), (b, a, "train")):
        for point in _unfuse_residual(ours, theirs):
            how[point] = "residual"
        for point, others in _split_fused(ours, theirs, names, head_size):
            how[point], layouts[point] = "fused", (side, others)
        how.update(_next_input(ours, theirs, names))
        for point in rotate(ours, theirs):
            how[point] = "rotary"
    pairs = [
        PointPair(
            point=point,
            rollout=a.sources[point],
            train=b.sources[point],
            how=how.get(point, "name"),
            order=b.order.get(point, a.order.get(point, 0)),
            other_layouts=layouts.get(point, ("", ()))[1],
            fused_side=layouts.get(point, ("", ()))[0],
        )
        for point in a.sources
        if point in b.sources
    ]
    pairs += [
        PointPair(
            point=point,
            rollout=a.extra[point],
            train=b.extra[point],
            how="name",
            order=b.order.get(point, 0),
        )
        for point in a.extra
        if point in b.extra and point not in a.sources
    ]
    pairs.sort(key=lambda pair: pair.order)
    met = {pair.point for pair in pairs}
    return PointJoin(
        pairs=tuple(pairs),
        rollout_only=tuple(p for p in rollout.sources if p not in met and p not in a.used),
        train_only=tuple(p for p in train.sources if p not in met and p not in b.used),
    )


def _unfuse_residual(ours: SideWork, theirs: SideWork) -> Iterator[Point]:
    """A tensor and its residual as two values of a module with submodules, or as two inputs: their sum.

    A normalisation also gives the pair back, but there the first one is its result.
    """
    for point, sources in list(ours.extra.items()):
        main = changed(point, part=point.direction)
        if main not in ours.sources or main not in theirs.sources or point in theirs.extra:
            continue
        if point.function or point.phase != "forward":
            continue
        if point.direction == "output" and point.module not in ours.parents:
            continue
        residuals = by_call(sources)
        joined: list[Source] = []
        for source in ours.sources[main]:
            residual = residuals.get((source.rank, source.call))
            both = source.records if residual is None else (*source.records, *residual.records)
            joined.append(source if residual is None else replace(source, records=both, op=Op.SUM))
        ours.sources[main] = tuple(joined)
        yield main


def _split_fused(
    ours: SideWork, theirs: SideWork, names: NameMap, head_size: int | None
) -> Iterator[tuple[Point, tuple[tuple[Columns, ...], ...]]]:
    """A fused projection's output as the outputs that the other side has one by one."""
    rules = {rule.module: rule for rule in names.fused}
    for point, sources in list(ours.sources.items()):
        rule = rules.get(point.module.rpartition(".")[2])
        if rule is None or point.function or point in theirs.sources or point.part != point.direction:
            continue
        targets = [changed(point, module=sibling(point.module, part)) for part in rule.parts]
        if not all(target in theirs.sources for target in targets):
            continue
        if point.direction == "input":
            for target in targets:
                ours.add(target, sources, after=point)
                yield target, ()
            continue
        widths = [theirs.sources[target][0].width for target in targets]
        for place, target in enumerate(targets):
            total = sources[0].width
            places = [columns(layout, widths, place, total, head_size) for layout in rule.layouts]
            first, *others = [(item,) for item in places if item]
            ours.add(target, tuple(replace(s, columns=first) for s in sources), after=point)
            yield target, tuple(others)


def _next_input(ours: SideWork, theirs: SideWork, names: NameMap) -> Iterator[tuple[Point, str]]:
    """A module whose output is what its neighbour takes, where the other side has none that computes the same.

    It meets the neighbour's input: under its own name where the other side has that name too (an ``act_fn`` of one
    argument beside one of a fused pair), else as that input.
    """
    for rule in names.output_is_input_of:
        for point, sources in list(ours.sources.items()):
            if point.function or point.phase != "forward" or point.part != "output":
                continue
            if point.module.rpartition(".")[2] != rule.module:
                continue
            goal = changed(point, module=sibling(point.module, rule.next), direction="input", part="input")
            if point in theirs.sources:
                if goal in theirs.sources and _takes_pair(ours, theirs, point):
                    theirs.sources[point] = theirs.sources[goal]
                    yield point, "fused"
                    yield from _pair_input(theirs, point, names)
                continue
            if goal in theirs.sources and goal not in ours.sources:
                ours.add(goal, sources, after=point)
                yield goal, "input"
            if goal in ours.sources:
                ours.forget(point.module)


def _pair_input(theirs: SideWork, point: Point, names: NameMap) -> Iterator[tuple[Point, str]]:
    """What a fused ``act_fn`` takes, against the other side's gate and up put side by side."""
    taken = changed(point, direction="input", part="input")
    theirs.sources.pop(taken, None)
    for rule in names.fused:
        parts = [changed(point, module=sibling(point.module, part)) for part in rule.parts]
        if len(parts) == 2 and all(part in theirs.sources for part in parts):
            second = by_call(theirs.sources[parts[1]])
            theirs.sources[taken] = tuple(
                replace(
                    source, op=Op.CONCAT, records=(*source.records, *second[source.rank, source.call].records)
                )
                for source in theirs.sources[parts[0]]
                if (source.rank, source.call) in second
            )
            yield taken, "fused"
            return


def _takes_pair(ours: SideWork, theirs: SideWork, point: Point) -> bool:
    """True where our module takes a pair side by side, and theirs one of it."""
    taken = changed(point, direction="input", part="input")
    if taken not in ours.sources or taken not in theirs.sources:
        return False
    mine, other, given = (
        ours.sources[taken][0].width,
        theirs.sources[taken][0].width,
        ours.sources[point][0].width,
    )
    return mine == 2 * given and other == given
