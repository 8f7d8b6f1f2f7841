"""Two sides put together before anything is judged: tokens, weights, row tables, points.

Takes two sides; gives what the stages and the replay both start from. Nothing is compared here but ids and
fingerprints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainfer.check.align.adapters import PointJoin, join_points
from trainfer.check.align.names import NameMap, name_map
from trainfer.check.align.points import SidePoints, collect
from trainfer.check.align.rows import LabelledTable, RawTables, TableId, label_tables
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tables import RowPlans
from trainfer.check.compare.tokens import TokenResult, check_tokens
from trainfer.check.compare.weights import WeightResult, check_weights
from trainfer.check.dump.records import SequenceRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSides:
    """Both sides; pairs are (rollout, train)."""

    sides: tuple[ReadableSide, ReadableSide]
    names: NameMap
    raw: tuple[RawTables, RawTables]
    tokens: TokenResult
    weights: WeightResult
    tables: tuple[Mapping[TableId, LabelledTable], Mapping[TableId, LabelledTable]]
    plans: RowPlans
    points: tuple[SidePoints, SidePoints]
    join: PointJoin


def join_sides(rollout: ReadableSide, train: ReadableSide, *, names: NameMap | None = None) -> JoinedSides:
    """Read both sides' records and put them together; ``names`` as in ``run_stages``."""
    names = names or name_map()
    raw = RawTables(rollout), RawTables(train)
    tokens = check_tokens(rollout, train, raw)
    used = _versions(raw[0], tokens.sequences[0]), _versions(raw[1], tokens.sequences[1])
    head_size = _head_size(train) or _head_size(rollout)
    weights = check_weights(rollout, train, used, names, head_size=head_size)
    tables = label_tables(raw, weights.versions, tokens.labels)
    points = collect(rollout, names), collect(train, names)
    return JoinedSides(
        sides=(rollout, train),
        names=names,
        raw=raw,
        tokens=tokens,
        weights=weights,
        tables=tables,
        plans=RowPlans(*tables),
        points=points,
        join=join_points(*points, names, head_size=head_size),
    )


def _versions(raw: RawTables, sequences: Sequence[SequenceRecord]) -> tuple[int, ...]:
    recorded = {record.weights_version for record in sequences if record.pass_name != "executed"}
    return tuple(sorted({*raw.versions.values(), *recorded}))


def _head_size(side: ReadableSide) -> int | None:
    """Of keys, from the model's configuration."""
    config = side.manifest.model_config
    size, width, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int) and size > 0:
        return size
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        return width // heads
    return None
