"""Makes points of two unlike models meet: fused projections, residual pairs, rotary modules, shards.

Takes both sides' points; gives pairs, each saying how it was matched, and the points that have no partner.
Modules are matched by what they compute: a fused ``qkv_proj`` gives the three outputs that the other side
has apart; a layer that returns ``(hidden, residual)`` gives their sum where the other returns one tensor; an
``act_fn`` that takes the fused pair gives what ``down_proj`` takes. Reshaping is described here as columns
and sums, and done by ``compare.values``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainfer.check.align.names import NameMap, parent_of, sibling
from trainfer.check.align.points import Columns, Op, Point, SidePoints, Source, row_width


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


Sources = dict[Point, tuple[Source, ...]]


def join_points(
    rollout: SidePoints, train: SidePoints, names: NameMap, *, head_size: int | None = None
) -> PointJoin:
    """Pair the points of two sides; ``head_size`` is that of the keys, for layouts that go by heads."""
    a, b = _Work(rollout), _Work(train)
    how: dict[Point, str] = {}
    layouts: dict[Point, tuple[str, tuple[tuple[Columns, ...], ...]]] = {}
    for ours, theirs, side in ((a, b, "rollout"), (b, a, "train")):
        for point in _unfuse_residual(ours, theirs):
            how[point] = "residual"
        for point, others in _split_fused(ours, theirs, names, head_size):
            how[point], layouts[point] = "fused", (side, others)
        for point in _next_input(ours, theirs, names):
            how[point] = "input"
        for point in _rotate(ours, theirs):
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


class _Work:
    """A side's points while partners are sought."""

    def __init__(self, side: SidePoints) -> None:
        self.sources: Sources = dict(side.sources)
        self.extra = side.extra
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


def _other(point: Point, **changes: object) -> Point:
    return replace(point, **changes)  # pyright: ignore[reportArgumentType]


def _by_call(sources: Sequence[Source]) -> dict[tuple[int, int], Source]:
    return {(source.rank, source.call): source for source in sources}


def _unfuse_residual(ours: _Work, theirs: _Work) -> Iterator[Point]:
    """A tensor and its residual as two values of a module with submodules, or as two inputs: their sum.

    A normalisation also gives the pair back, but there the first one is its result.
    """
    for point, sources in list(ours.extra.items()):
        main = _other(point, part=point.direction)
        if main not in ours.sources or main not in theirs.sources or point in theirs.extra:
            continue
        if point.direction == "output" and point.module not in ours.parents:
            continue
        residuals = _by_call(sources)
        joined: list[Source] = []
        for source in ours.sources[main]:
            residual = residuals.get((source.rank, source.call))
            both = source.records if residual is None else (*source.records, *residual.records)
            joined.append(source if residual is None else replace(source, records=both, op=Op.SUM))
        ours.sources[main] = tuple(joined)
        yield main


def _split_fused(
    ours: _Work, theirs: _Work, names: NameMap, head_size: int | None
) -> Iterator[tuple[Point, tuple[tuple[Columns, ...], ...]]]:
    """A fused projection's output as the outputs that the other side has one by one."""
    rules = {rule.module: rule for rule in names.fused}
    for point, sources in list(ours.sources.items()):
        rule = rules.get(point.module.rpartition(".")[2])
        if rule is None or point in theirs.sources or point.part != point.direction:
            continue
        targets = [_other(point, module=sibling(point.module, part)) for part in rule.parts]
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


def columns(
    layout: str, widths: Sequence[int], place: int, total: int, head_size: int | None = None
) -> Columns:
    """Where one part lies in a fused output of width ``total``; empty where the layout cannot be.

    - ``blocks``: part after part. Of one rank of a tensor-parallel module ``total`` is a share, and so is each part.
    - ``grouped`` (Megatron's grouped queries): for each key/value head its queries, its key, its value.
    - ``alternating``: element by element in turn.

    Example: q, k, v of widths 4, 2, 2 with head size 1: grouped columns of q are (0, 2), (4, 6).
    """
    whole = sum(widths)
    if total <= 0 or whole % total:
        return ()
    shares = [width * total // whole for width in widths]
    if layout == "blocks":
        start = sum(shares[:place])
        return ((start, start + shares[place]),)
    if layout == "alternating":
        if len(set(shares)) != 1:
            return ()
        return tuple((place + step, place + step + 1) for step in range(0, total, len(shares)))
    assert layout == "grouped", layout
    return _grouped(shares, place, head_size)


def _grouped(shares: Sequence[int], place: int, head_size: int | None) -> Columns:
    smallest = min(shares)
    if head_size is None or smallest % head_size or any(share % smallest for share in shares):
        return ()
    ratios = [share // smallest for share in shares]
    step, start = head_size * sum(ratios), head_size * sum(ratios[:place])
    stop = start + head_size * ratios[place]
    return tuple((group * step + start, group * step + stop) for group in range(smallest // head_size))


def _next_input(ours: _Work, theirs: _Work, names: NameMap) -> Iterator[Point]:
    """A module of one side only whose output is what the next one takes: that input stands for it."""
    for rule in names.output_is_input_of:
        for point, sources in list(ours.sources.items()):
            if point.module.rpartition(".")[2] != rule.module or point.part != "output":
                continue
            goal = _other(point, module=sibling(point.module, rule.next), direction="input", part="input")
            partner = theirs.sources.get(point)
            if partner is not None and _takes_same_width(ours, theirs, point):
                continue
            if goal in theirs.sources and goal not in ours.sources:
                ours.add(goal, sources, after=point)
                yield goal
            if goal in ours.sources:
                ours.used.add(point)
                ours.sources.pop(point)
                for taken in [p for p in ours.sources if p.module == point.module]:
                    ours.used.add(taken)
                    ours.sources.pop(taken)


def _takes_same_width(ours: _Work, theirs: _Work, point: Point) -> bool:
    """False where one side's module takes the fused pair and the other's takes one of it."""
    taken = _other(point, direction="input", part="input")
    if taken not in ours.sources or taken not in theirs.sources:
        return True
    mine, other = ours.sources[taken][0], theirs.sources[taken][0]
    given = ours.sources[point][0]
    fused = mine.width == 2 * given.width
    return not (fused and other.width != mine.width)


def _rotate(ours: _Work, theirs: _Work) -> Iterator[Point]:
    """A rotary module that gives turned queries and keys, against one that gives cos and sin.

    The other side's queries (after their norm where there is one) are turned by its own cos and sin.
    """
    tables = [p for p in theirs.sources if p.module.endswith("rotary_emb") and p.part == "output"]
    mine = [p for p in ours.sources if p.module.endswith("rotary_emb") and p.part == "output"]
    for point in mine:
        keys = next((e for e in ours.extra if _same_run(e, point) and e.part != "output"), None)
        keys = keys or next((p for p in ours.sources if _same_run(p, point) and p.part == "1"), None)
        attention = _attention_of(point, theirs)
        turned = ours.sources[point][0].width
        if not tables or attention is None or turned == theirs.sources[tables[0]][0].width:
            continue
        names = {"query": ("q_norm", "q_proj"), "key": ("k_norm", "k_proj")}
        for part, given in (("query", point), ("key", keys)):
            sources = ours.sources.get(given) or ours.extra.get(given) if given is not None else None
            before = next((p for p in _outputs(theirs, attention, names[part]) if p in theirs.sources), None)
            if sources is None or before is None:
                continue
            target = _other(point, module=f"{attention}.rotary_emb", occurrence=0, part=part)
            made = _turned(theirs, before, tables[0])
            if made:
                ours.add(target, sources, after=point)
                theirs.sources[target] = made
                theirs.order[target] = theirs.order[before]
                yield target
        ours.sources.pop(point)
        ours.used.add(point)


def _same_run(point: Point, other: Point) -> bool:
    return _other(point, part="") == _other(other, part="")


def _attention_of(point: Point, theirs: _Work) -> str | None:
    """The other side's attention that a rotary module (shared: its nth use) belongs to."""
    own = parent_of(point.module)
    attentions = sorted(
        {parent_of(module) for module in theirs.modules if module.endswith(".q_proj")}, key=_natural
    )
    if point.occurrence == 0 and own in attentions:
        return own
    return attentions[point.occurrence] if point.occurrence < len(attentions) else None


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _outputs(work: _Work, attention: str, leaves: Sequence[str]) -> list[Point]:
    return [
        p
        for leaf in leaves
        for p in work.sources
        if p.module == f"{attention}.{leaf}" and p.part == "output" and p.phase == "forward"
    ]


def _turned(work: _Work, before: Point, cos: Point) -> tuple[Source, ...]:
    sines = work.extra.get(_other(cos, part="1")) or work.sources.get(_other(cos, part="1")) or ()
    cos_by_call, sin_by_call = _by_call(work.sources[cos]), _by_call(sines)
    made: list[Source] = []
    for source in work.sources[before]:
        cosine, sine = (
            cos_by_call.get((source.rank, source.call)),
            sin_by_call.get((source.rank, source.call)),
        )
        if cosine is not None and sine is not None:
            records = (*source.records, *cosine.records, *sine.records)
            made.append(replace(source, records=records, op=Op.ROTATE))
    return tuple(made)


def gather_shards(
    sources: Sequence[Source], width: int, same_rows: Mapping[tuple[int, int], object]
) -> tuple[Source, ...]:
    """Tensor-parallel shards of one point put side by side, where together they have ``width`` features.

    Args:
        sources: One side's sources of a point.
        width: Features of the other side.
        same_rows: (rank, table) -> equal values for tables with equal rows.
    """
    if not sources or sources[0].width == width or width % sources[0].width:
        return tuple(sources)
    number = width // sources[0].width
    ranks: dict[int, list[Source]] = {}
    for source in sources:
        ranks.setdefault(source.rank, []).append(source)
    if len(ranks) % number or len({len(calls) for calls in ranks.values()}) != 1:
        return tuple(sources)
    ordered, gathered = sorted(ranks), list[Source]()
    for start in range(0, len(ordered), number):
        for together in zip(*(ranks[rank] for rank in ordered[start : start + number]), strict=True):
            if len({same_rows.get((source.rank, source.table)) for source in together}) != 1:
                return tuple(sources)
            gathered.append(_side_by_side(together))
    return tuple(gathered)


def _side_by_side(shards: Sequence[Source]) -> Source:
    records = tuple(record for shard in shards for record in shard.records)
    first = shards[0]
    parts = first.columns * len(shards) if first.columns else ()
    if not parts and any(row_width(record) != first.width for record in records):
        parts = tuple(((0, row_width(record)),) for record in records)
    return replace(first, records=records, op=Op.CONCAT, columns=parts)
