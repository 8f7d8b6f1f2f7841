"""Rotary modules that give unlike things: cos and sin on one side, turned queries and keys on the other.

Takes both sides' points; adds points at which they meet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainfer.check.align.names import parent_of
from trainfer.check.align.points import FLOATS, Op, Point, Source
from trainfer.check.align.work import SideWork, by_call, changed


def rotate(ours: SideWork, theirs: SideWork) -> Iterator[Point]:
    """A rotary module that gives turned queries and keys, against one that gives cos and sin.

    The other side's queries (after their norm where there is one) are turned by its own cos and sin. Uses of a shared
    module are told apart as occurrences of the other side's module, layer by layer.
    """
    tables = [p for p in theirs.sources if _is_rotary(p)]
    for point in [p for p in ours.sources if _is_rotary(p)]:
        layer = _layer_of_use(point, theirs)
        if not tables or layer is None or ours.sources[point][0].width == theirs.sources[tables[0]][0].width:
            continue
        number, attention = layer
        given, taken = _floats_of_run(ours, point), _floats_of_run(ours, changed(point, direction="input"))
        for place, (part, leaves) in enumerate(
            (("query", ("q_norm", "q_proj")), ("key", ("k_norm", "k_proj")))
        ):
            before = next(iter(_outputs(theirs, attention, leaves)), None)
            if before is None or place >= len(given):
                continue
            target = changed(point, module=tables[0].module, occurrence=number + 1, part=part)
            made = _turned(theirs, before, tables[0])
            if not made:
                continue
            yield from _meet(ours, theirs, target, given[place], (made, before), point)
            if place < len(taken):
                source = changed(target, direction="input")
                yield from _meet(ours, theirs, source, taken[place], (theirs.sources[before], before), point)
        ours.forget(point.module, occurrence=point.occurrence)


def _is_rotary(point: Point) -> bool:
    is_output = point.part == "output" and point.phase == "forward"
    return is_output and not point.function and point.module.endswith("rotary_emb")


def _meet(
    ours: SideWork,
    theirs: SideWork,
    target: Point,
    mine: tuple[Source, ...],
    other: tuple[tuple[Source, ...], Point],
    used: Point,
) -> Iterator[Point]:
    """Put what either side has under one point."""
    ours.add(target, mine, after=used)
    theirs.sources[target] = other[0]
    theirs.order[target] = theirs.order[other[1]]
    yield target


def _floats_of_run(work: SideWork, point: Point) -> list[tuple[Source, ...]]:
    """Float values that one use of a module gives (or takes), in order."""
    found = [
        (work.order[p], sources)
        for p, sources in (*work.sources.items(), *work.extra.items())
        if _same_run(p, point)
    ]
    return [
        sources for _, sources in sorted(found, key=lambda item: item[0]) if sources[0].first.dtype in FLOATS
    ]


def _same_run(point: Point, other: Point) -> bool:
    return changed(point, part="") == changed(other, part="")


def _layer_of_use(point: Point, theirs: SideWork) -> tuple[int, str] | None:
    """Number and name of the other side's attention that a rotary module (shared: its nth use) belongs to."""
    own = parent_of(point.module)
    attentions = sorted(
        {parent_of(m) for m in theirs.modules if m.endswith((".q_proj", ".qkv_proj"))}, key=_natural
    )
    shared = sum(module.endswith("rotary_emb") for module in {p.module for p in theirs.sources}) >= 1
    if point.occurrence == 0 and own in attentions and (attentions.index(own) > 0 or not shared):
        return attentions.index(own), own
    return (point.occurrence, attentions[point.occurrence]) if point.occurrence < len(attentions) else None


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _outputs(work: SideWork, attention: str, leaves: Sequence[str]) -> list[Point]:
    return [
        p
        for leaf in leaves
        for p in work.sources
        if p.module == f"{attention}.{leaf}"
        and p.part == "output"
        and p.phase == "forward"
        and not p.function
    ]


def _turned(work: SideWork, before: Point, cos: Point) -> tuple[Source, ...]:
    sines = work.extra.get(changed(cos, part="1")) or work.sources.get(changed(cos, part="1")) or ()
    cos_by_call, sin_by_call = by_call(work.sources[cos]), by_call(sines)
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
