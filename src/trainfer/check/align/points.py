"""What one side captured, as canonical points.

Takes tensor records; gives points: a place in the model with a meaning (``model.norm``, output), and for each
call the records that hold its rows. A point's part is named by what it is, not by how the argument was called:
``output`` is the first float tensor that a module gives, ``input`` the first that it takes; whole numbers (ids,
positions, chosen experts) are ``index``. Of functions only floats count: the rest are masks and places, which
depend on how the batch is laid out. Nothing is read here.
"""

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainfer.check.align.names import NameMap, canonical
from trainfer.check.align.side import Side
from trainfer.check.dump.records import NO_TABLE, CallRecord, Role, TensorRecord

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

_PHASES = {
    Role.INPUT: ("forward", "input"),
    Role.OUTPUT: ("forward", "output"),
    Role.OUTPUT_GRADIENT: ("backward", "input"),
    Role.INPUT_GRADIENT: ("backward", "output"),
    Role.PARAMETER_GRADIENT: ("parameters", "output"),
}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """A place in the model. Example: the second use of a rotary table within one forward call has occurrence 1."""

    module: str
    function: str
    """Empty for modules."""
    occurrence: int
    phase: str
    """``forward``, ``backward`` (gradients: taken is that of the output, given that of the input), ``parameters``."""
    direction: str
    """``input`` or ``output``."""
    part: str


class Op(enum.Enum):
    """How a point's rows come out of its records."""

    SINGLE = "single"
    SUM = "sum"
    """Residual stream kept in two parts: their sum."""
    CONCAT = "concat"
    """Side by side: shards of a tensor-parallel module, or parts of a fused one."""
    ROTATE = "rotate"
    """Queries or keys (first record) turned by cos (second) and sin (third)."""


Columns = tuple[tuple[int, int], ...]
"""Ranges of a row's features, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What holds a point's rows in one call."""

    rank: int
    call: int
    pass_name: str
    table: int
    """``NO_TABLE`` where it is not known which rows these are."""
    call_table: int
    """The table of all slots of the call."""
    slots: int
    """Slots of the call; rows of a tensor that the batch shares are repeated up to this."""
    records: tuple[TensorRecord, ...]
    op: Op = Op.SINGLE
    ranks: tuple[int, ...] = ()
    """Rank of each record where they come from several; empty: all of ``rank``."""
    columns: tuple[Columns, ...] = ()
    """Columns that are taken of each record before ``op``; empty: all."""

    @property
    def first(self) -> TensorRecord:
        """The record that stands for the others."""
        return self.records[0]

    @property
    def width(self) -> int:
        """Features of a row."""
        widths = [row_width(record) for record in self.records]
        if self.columns:
            widths = [sum(stop - start for start, stop in columns) for columns in self.columns]
        return sum(widths) if self.op is Op.CONCAT else widths[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SidePoints:
    """All points of one side, with what was seen of its modules."""

    sources: Mapping[Point, tuple[Source, ...]]
    order: Mapping[Point, int]
    """When a point's first value was there: rises with execution."""
    extra: Mapping[Point, tuple[Source, ...]]
    """Second outputs and inputs of the same shape (the residual stream), under their own names."""


def row_width(record: TensorRecord) -> int:
    """Features per row: elements of the dimensions that do not run over rows."""
    if not record.row_dims:
        return record.shape[-1] if record.shape else 1
    return math.prod(size for dim, size in enumerate(record.shape) if dim not in record.row_dims)


def collect(side: Side, names: NameMap) -> SidePoints:
    """Group one side's tensor records into points."""
    found: dict[Point, list[Source]] = {}
    extra: dict[Point, list[Source]] = {}
    order: dict[Point, int] = {}
    for rank in side.ranks:
        calls = side.calls(rank)
        runs = _runs(side.tensors(rank), names)
        lengths = _call_lengths(runs)
        for run in runs:
            for point, source, primary in _points_of_run(run, rank, calls, lengths):
                (found if primary else extra).setdefault(point, []).append(source)
                order.setdefault(point, source.first.id)
    return SidePoints(
        sources={point: tuple(sources) for point, sources in found.items()},
        extra={point: tuple(sources) for point, sources in extra.items()},
        order=order,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Records of one module (or function) in one call, one phase and direction."""

    module: str
    function: str
    occurrence: int
    phase: str
    direction: str
    records: list[TensorRecord]


def _runs(records: Iterable[TensorRecord], names: NameMap) -> list[_Run]:
    runs: dict[tuple[object, ...], _Run] = {}
    modules: dict[str, str] = {}
    for record in records:
        phase = _PHASES.get(record.role)
        if phase is None:
            continue
        key = (record.step, record.call, record.module, record.function, record.occurrence, record.role)
        if record.role is Role.PARAMETER_GRADIENT:
            key = (*key, record.name)
        run = runs.get(key)
        if run is None:
            module = modules.get(record.module)
            if module is None:
                module = modules[record.module] = canonical(record.module, names)
            run = runs[key] = _Run(
                module=module,
                function=record.function or "",
                occurrence=record.occurrence,
                phase=phase[0],
                direction=phase[1],
                records=[],
            )
        run.records.append(record)
    return list(runs.values())


def _call_lengths(runs: Iterable[_Run]) -> dict[int, int]:
    """Token slots per batch entry of each call, from any tensor ``[B, T, ...]``."""
    lengths: dict[int, int] = {}
    for run in runs:
        for record in run.records:
            if record.row_dims == (0, 1):
                lengths.setdefault(record.call, record.shape[1])
    return lengths


def _points_of_run(
    run: _Run, rank: int, calls: Mapping[int, CallRecord], lengths: Mapping[int, int]
) -> Iterable[tuple[Point, Source, bool]]:
    """(point, source, True for a primary part)."""
    main: TensorRecord | None = None
    seen_index = False
    for record in run.records:
        if "mask" in record.name or (main is not None and _is_per_key(record)):
            continue
        is_float, primary = record.dtype in FLOATS, True
        if run.function and not is_float:
            continue
        part = record.name
        if run.phase == "parameters":
            part = record.name
        elif is_float and main is None and not part.startswith("past_key_values"):
            main, part = record, run.direction if part != "logits" else "logits"
        elif not is_float and not seen_index:
            seen_index, part = True, "index"
        elif is_float and main is not None and record.shape == main.shape and record.table == main.table:
            primary = False
        call = calls.get(record.call)
        table, slots = record.table, call.slots if call is not None else 0
        shared = call is not None and record.shape[:2] == (1, lengths.get(record.call))
        if table == NO_TABLE and call is not None and shared:
            table = call.table
        point = Point(
            module=run.module,
            function=run.function,
            occurrence=run.occurrence,
            phase=run.phase,
            direction=run.direction,
            part=part,
        )
        source = Source(
            rank=rank,
            call=record.call,
            pass_name=record.pass_name,
            table=table,
            call_table=call.table if call is not None else NO_TABLE,
            slots=slots,
            records=(record,),
        )
        yield point, source, primary


def _is_per_key(record: TensorRecord) -> bool:
    """Attention probabilities and cached keys, ``[B, heads, T, …]`` beside a result: as wide as the batch is long."""
    return len(record.shape) == 4 and record.row_dims == (0, 2)
