"""How parts lie in a whole: fused outputs, tensor-parallel shards.

Takes widths and sources; gives column ranges and sources put side by side. Describes only; ``compare.values`` does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainfer.check.align.points import Columns, Op, Source, row_width


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
    ranks = tuple(shard.rank for shard in shards for _ in shard.records)
    return replace(first, records=records, ranks=ranks, op=Op.CONCAT, columns=parts)
