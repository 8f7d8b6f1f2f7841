"""Runs every module again in float64, on each side's own captured inputs.

Takes two sides put together and the model; gives for each module what either side introduced, what it inherited, and
the noise floor that the introduced error is held against. One module at a time: memory is bounded by its float64
copy and a few thousand rows. What could not be replayed is named with the reason.
"""
# pyright: standard
# (torch's own types are partial)

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfer.check.align.names import parent_of
from trainfer.check.align.points import Point
from trainfer.check.align.rows import TableId
from trainfer.check.compare.joined import JoinedSides, join_sides
from trainfer.check.compare.records import Comparison, JoinedRows
from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.replay.execute import OUTPUT, Manner, Prepared, Reference, SideExecutor, part_names
from trainfer.check.replay.floors import UNIT, measure, sample_of
from trainfer.check.replay.inputs import LABELS, Captured, place
from trainfer.check.replay.measured import Measured, Terms, Widest, in_order, norms, widened, widest_of
from trainfer.check.replay.model import bare_kind, read_model
from trainfer.check.replay.modules import contraction_of
from trainfer.check.replay.records import ModuleReplay, NoiseFloor, Replay
from trainfer.check.replay.reference import SideWeights
from trainfer.check.replay.rows import Addresses, MissingRowsError, SideRows

CHUNK_BYTES = 64 * 2**20
MAX_CHUNK = 512
FULLY_MEASURED = 2
"""Modules of one kind and dtype whose noise floor is measured with every variant; those after it with one."""
MAX_WEIGHT_BYTES = 8 * 2**30
"""Of one module's own parameters in float64."""


def replay(
    rollout: ReadableSide,
    train: ReadableSide,
    comparison: Comparison | None,
    model: nn.Module,
    *,
    joined: JoinedSides | None = None,
) -> Replay:
    """Replay all modules that both sides captured.

    Args:
        rollout: The side that generated.
        train: The other one.
        comparison: What the stages found of the two, where that is known; the replay itself starts from the records.
        model: The model whose weights both sides are to have; it is neither changed nor copied as a whole.
        joined: The two sides put together, where that was done before.
    """
    both = joined or join_sides(rollout, train)
    del comparison
    try:
        reference = read_model(model, both)
    except Exception as error:  # noqa: BLE001
        reason = f"the model could not be run on a few token ids: {_line(error)}"
        return Replay(modules=(), not_replayed={"": reason})
    return Replayer(both, reference).all()


class Replayer:
    """Both sides and the model, ready to be run module by module."""

    def __init__(self, joined: JoinedSides, reference: Reference) -> None:
        self.joined, self.reference = joined, reference
        self._seen: Counter[tuple[object, ...]] = Counter()
        kinds = {name: bare_kind(module) for name, module in reference.modules.items()}
        tensors = {
            f"{name}.{local}" if name else local: tensor.detach()
            for name, module in reference.modules.items()
            for local, tensor in module._parameters.items()
            if tensor is not None
        }
        self.executors = tuple(self._executor(side, kinds, tensors) for side in range(2))

    def _executor(self, side: int, kinds: Mapping[str, str], tensors: Mapping[str, Tensor]) -> SideExecutor:
        joined = self.joined
        other = joined.sides[1 - side]
        weights = SideWeights(joined.sides[side], LABELS[side], joined.names, tensors, other=other)

        def is_proven(module: str) -> bool:
            versions = weights.versions(f"{module}.weight")
            return versions is None or bool(versions)

        return SideExecutor(
            self.reference,
            Captured(joined, side, kinds, is_proven=is_proven),
            SideRows(joined.sides[side], joined.raw[side], joined.tokens.sequences[side]),
            weights,
        )

    def all(self) -> Replay:
        """Module by module, in execution order."""
        found: list[tuple[str, list[Measured]]] = []
        reasons: dict[str, str] = {}
        order = {name: number for number, name in enumerate(self._order())}
        for name in order:
            try:
                found.append((name, list(self._module(name))))
            except (MissingRowsError, DamagedRecordError) as error:
                reasons[name] = str(error)
            except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                reasons[name] = f"it could not be run on captured rows: {_line(error)}"
        replayed = {name for name, _ in found}
        widest = widest_of([item for _, places in found for item in places])
        modules = tuple(
            self._record(name, places, order[name], replayed, widest) for name, places in found if places
        )
        return Replay(modules=modules, not_replayed=reasons, order=order)

    def _order(self) -> list[str]:
        """Modules with a captured result, by the time of their result on the train side."""
        when: dict[str, int] = {}
        for points in reversed(self.joined.points):
            for point, number in points.order.items():
                is_result = point.direction == "output" and point.phase == "forward" and not point.function
                if is_result and point.module in self.reference.modules:
                    when.setdefault(point.module, number)
        pairs = {pair.point.module: pair.order for pair in self.joined.join.pairs}
        when = {
            **{m: n for m, n in pairs.items() if m in self.reference.modules and m not in when},
            **when,
        }
        return sorted(when, key=lambda name: (when[name], name))

    def _module(self, name: str) -> Iterator[Measured]:
        prepared, point, rows, addresses = self._prepare(name)
        blocks = [
            (places, {key: norms(terms) for key, terms in found.items()})
            for places, found in self._terms(name, prepared, addresses, point)
        ]
        floors = self._floors(name, prepared, addresses, point)
        for key in blocks[0][1]:
            if all(key in found for _, found in blocks):
                pair = [self._floor(name, key, side, floors[side][key], addresses[side]) for side in range(2)]
                arrays = in_order(len(rows), [(places, found[key]) for places, found in blocks])
                yield Measured(place=key, rows=rows, arrays=arrays, floors=(pair[0], pair[1]))

    def blocks(self, name: str) -> Iterator[dict[str, Terms]]:
        """One module's terms as vectors, place by place (``OUTPUT`` or the part that is handed something), block of rows
        by block of rows.

        Raises:
            MissingRowsError: something that its replay needs was not captured.
        """
        prepared, point, _, addresses = self._prepare(name)
        for _, found in self._terms(name, prepared, addresses, point):
            yield found

    def _prepare(
        self, name: str
    ) -> tuple[tuple[Prepared, ...], Point, JoinedRows, tuple[Addresses, Addresses]]:
        prepared = tuple(executor.prepare(name) for executor in self.executors)
        self._check_size(prepared)
        point = self._point(name)
        rows, addresses = self._joined_rows(point, prepared)
        return prepared, point, rows, addresses

    def _check_size(self, prepared: Sequence[Prepared]) -> None:
        for one in prepared:
            count = sum(
                self.reference.modules[parent_of(full)]._parameters[full.rpartition(".")[2]].numel()  # type: ignore[union-attr]
                for full in one.tensors
            )
            if 8 * count > MAX_WEIGHT_BYTES:
                raise MissingRowsError(f"too large: {count} parameters in float64 at once")

    def _point(self, name: str) -> Point:
        """The module's result."""
        for leaf, part in part_names(self.reference.calls[name].outputs, "output"):
            if leaf.is_float:
                return place(name, "output", part)
        raise MissingRowsError("it gives no float tensor")

    def _joined_rows(
        self, point: Point, prepared: Sequence[Prepared]
    ) -> tuple[JoinedRows, tuple[Addresses, Addresses]]:
        """Rows that both sides captured and whose weights are proven."""
        sources = tuple(executor.captured.sources(point) for executor in self.executors)
        for label, mine in zip(LABELS, sources, strict=True):
            if not mine:
                raise MissingRowsError(f"its result was not captured in the {label} side")
        tables = [self.joined.plans.tables(label, mine) for label, mine in zip(LABELS, sources, strict=True)]
        if tables[0] is None or tables[1] is None:
            raise MissingRowsError("its rows are not known")
        plan = self.joined.plans.between(tables[0], tables[1])
        if not plan.blocks:
            raise MissingRowsError("no row of it has the same weights version and token prefix on both sides")
        proven = [self._proven(side, prepared[side]) for side in range(2)]
        kept: list[NDArray[np.bool_]] = []
        rollout: list[Addresses] = []
        train: list[Addresses] = []
        for block in plan.blocks:
            pair = tables[0][block.rollout], tables[1][block.train]
            good = all(self._is_proven(side, pair[side], proven[side]) for side in range(2))
            kept.append(np.full(len(block.rollout_slots), good))
            if good:
                rollout.append(self.executors[0].rows.addresses(pair[0], block.rollout_slots))
                train.append(self.executors[1].rows.addresses(pair[1], block.train_slots))
        if not rollout:
            for side, executor in enumerate(self.executors):
                if proven[side] is not None and not proven[side]:
                    executor.weights.refuse(prepared[side].tensors)
            raise MissingRowsError("the model's weights are those of no version that both sides have rows of")
        return _some_rows(plan.rows, np.concatenate(kept)), (_together(rollout), _together(train))

    def _proven(self, side: int, prepared: Prepared) -> frozenset[int] | None:
        """Weights versions of a side in which all parameters that are run are the model's; None for all."""
        found = [self.executors[side].weights.versions(name) for name in prepared.tensors]
        known = [versions for versions in found if versions is not None]
        return frozenset.intersection(*known) if known else None

    def _is_proven(self, side: int, table: TableId, versions: frozenset[int] | None) -> bool:
        return versions is None or self.joined.raw[side].versions[table] in versions

    def _terms(
        self,
        name: str,
        prepared: Sequence[Prepared],
        addresses: tuple[Addresses, Addresses],
        point: Point,
    ) -> Iterator[tuple[NDArray[np.int64], dict[str, Terms]]]:
        for places in self._chunks(name, prepared, addresses):
            parts = tuple(item.take(places) for item in addresses)
            exact = [
                executor.run(name, one, rows, Manner())
                for executor, one, rows in zip(self.executors, prepared, parts, strict=True)
            ]
            found: dict[str, Terms] = {}
            for key in exact[0]:
                terms = self._place(key, exact, parts, point) if key in exact[1] else None
                if terms is not None:
                    found[key] = terms
            if not found:
                raise MissingRowsError("nothing that it computes was captured on both sides")
            yield places, found

    def _chunks(
        self, name: str, prepared: Sequence[Prepared], addresses: tuple[Addresses, Addresses]
    ) -> Iterator[NDArray[np.int64]]:
        """Rows that are handled at once; whole sequences stay together."""
        leaves = (*self.reference.calls[name].inputs, *self.reference.calls[name].outputs)
        width = max((leaf.width for leaf in leaves), default=1)
        step = int(max(1, min(MAX_CHUNK, CHUNK_BYTES // (8 * width))))
        count = len(addresses[0])
        if not any(one.whole_sequences for one in prepared):
            yield from (np.arange(start, min(start + step, count)) for start in range(0, count, step))
            return
        names = addresses[1].ranks << 40 | addresses[1].sequences
        order = np.argsort(names, kind="stable")
        waiting: list[NDArray[np.int64]] = []
        for part in np.split(order, np.flatnonzero(np.diff(names[order])) + 1):
            if waiting and sum(map(len, waiting)) + len(part) > step:
                yield np.concatenate(waiting)
                waiting = []
            waiting.append(part)
        yield np.concatenate(waiting)

    def _place(
        self, key: str, exact: Sequence[Mapping[str, Tensor]], parts: Sequence[Addresses], point: Point
    ) -> Terms | None:
        """Captured values of one place beside its replay; None where a side did not capture it."""
        outputs: list[Tensor] = []
        for executor, rows in zip(self.executors, parts, strict=True):
            where = self._where(key, point)
            sources = executor.captured.by_call(where)
            if not sources:
                return None
            values = executor.rows.fetch(sources, rows, f"{where.module}'s {where.direction}").double()
            outputs.append(values.to(self.reference.device))
        if any(a.shape != b[key].shape for a, b in zip(outputs, exact, strict=True)):
            return None
        return Terms(outputs=(outputs[0], outputs[1]), exact=(exact[0][key].double(), exact[1][key].double()))

    def _where(self, key: str, result: Point) -> Point:
        """The point of a place of the module that gives ``result``."""
        if key == OUTPUT:
            return result
        number = key.removeprefix(f"{OUTPUT} ")
        return place(result.module, "output", number) if number != key else self._input_of(key)

    def _input_of(self, part: str) -> Point:
        leaves = part_names(self.reference.calls[part].inputs, "input")
        floats = [name for leaf, name in leaves if leaf.is_float]
        return place(part, "input", floats[0] if floats else "index")

    def _floors(
        self,
        name: str,
        prepared: Sequence[Prepared],
        addresses: tuple[Addresses, Addresses],
        point: Point,
    ) -> list[dict[str, tuple[float, tuple[str, ...]]]]:
        """Of either side. All variants are run for the first modules of a kind; where both sides compute in one dtype,
        on the train side's rows.
        """
        found: list[dict[str, tuple[float, tuple[str, ...]]]] = []
        dtypes = [executor.captured.sources(point)[0].first.dtype for executor in self.executors]
        manners = [Manner(wide=False, autocast=self._autocast(side)) for side in range(2)]
        alike = dtypes[0] == dtypes[1] and manners[0] == manners[1]
        leaves = (*self.reference.calls[name].inputs, *self.reference.calls[name].outputs)
        widths = tuple(leaf.width for leaf in leaves if leaf.is_float)
        for side, executor in enumerate(self.executors):
            kind = (self.reference.operators[name], dtypes[side], widths)
            every = self._seen[kind] < FULLY_MEASURED and not (alike and side == 0)
            self._seen[kind] += every
            sample = sample_of(addresses[side], whole_sequences=prepared[side].whole_sequences)
            found.append(measure(executor, name, prepared[side], sample, manners[side], every_variant=every))
        return found

    def _autocast(self, side: int) -> torch.dtype | None:
        names = {
            call.autocast
            for rank in self.joined.sides[side].ranks
            for call in self.joined.sides[side].calls(rank).values()
        }
        name = next(iter(names - {None}), None) if len(names) == 1 else None
        return None if name is None else getattr(torch, name.removeprefix("torch."), None)

    def _floor(
        self, name: str, key: str, side: int, measured: tuple[float, tuple[str, ...]], rows: Addresses
    ) -> NoiseFloor:
        where = self._where(key, self._point(name))
        record = self.executors[side].captured.sources(where)[0].first
        template, operator = self.reference.calls[name], self.reference.operators[name]
        leaves = template.outputs if where.direction == "output" else self.reference.calls[key].inputs
        width = next((leaf.width for leaf in leaves if leaf.is_float), 1)
        width_in = next((leaf.width for leaf in template.inputs if leaf.is_float), 1)
        module = self.reference.modules[name]
        attends = operator == "attention"
        return NoiseFloor(
            operator=operator,
            dtype=record.dtype,
            width=width,
            contraction=contraction_of(module, operator, width_in),
            sequence=int(rows.positions.max(initial=0)) + 1 if attends else 1,
            value=max(measured[0], UNIT.get(record.dtype, 0.0)),
            variants=tuple(label for label in dict.fromkeys(measured[1]) if label),
        )

    def _record(
        self,
        name: str,
        places: Sequence[Measured],
        order: int,
        replayed: set[str],
        widest: Widest,
    ) -> ModuleReplay:
        """The place of a module that is furthest above its floor stands for it."""
        made: list[ModuleReplay] = []
        for item in places:
            floors = [widened(item.place, floor, widest) for floor in item.floors]
            made.append(
                ModuleReplay(
                    module=name,
                    operator=self.reference.operators[name],
                    order=order,
                    rows=item.rows,
                    introduced_rollout=item.arrays[0],
                    introduced_train=item.arrays[1],
                    inherited=item.arrays[2],
                    difference=item.arrays[3],
                    floors=(floors[0], floors[1]),
                    leaf=not any(
                        other.startswith(f"{name}." if name else "") and other != name for other in replayed
                    ),
                    place=item.place if item.place.startswith(OUTPUT) else f"input of {item.place}",
                )
            )
        return max(made, key=lambda m: (max(m.factors), m.place == OUTPUT))


def _some_rows(rows: JoinedRows, kept: NDArray[np.bool_]) -> JoinedRows:
    if kept.all():
        return rows
    return replace(rows, labels=rows.labels[kept], positions=rows.positions[kept], passes=rows.passes[kept])


def _together(parts: Sequence[Addresses]) -> Addresses:
    return Addresses(
        ranks=np.concatenate([part.ranks for part in parts]),
        calls=np.concatenate([part.calls for part in parts]),
        sequences=np.concatenate([part.sequences for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
    )


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
