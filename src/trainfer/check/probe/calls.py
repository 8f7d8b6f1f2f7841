"""The forward calls of one capture: numbered, named, their rows told apart.

Takes the root module's arguments when it starts and its output when it ends; gives a ``ForwardCall`` that hooks
record into, and writes its row tables and its call record.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from trainfer.check.dump.records import NO_CALL, NO_TABLE, CallRecord, RowLayout, RowsRecord
from trainfer.check.dump.writer import DumpWriter
from trainfer.check.probe.call import ForwardCall, SlotSubset
from trainfer.check.probe.given import Rows
from trainfer.check.probe.leaves import KeyValueCache
from trainfer.check.probe.root import RootCall, cache_of_output, named_prefixes, packed_layout, read_root_call
from trainfer.check.probe.rows import CacheHistory, CallInputs, RowTable, RowTracker, is_decode, rows_to_keep
from trainfer.check.probe.settings import CaptureSettings
from trainfer.check.probe.sink import UNREADABLE, TensorSink
from trainfer.errors import CaptureError

RowSource = Rows | Callable[[], Rows | None] | None
"""Rows of every call, or who is asked for them when a call starts."""


class WatchedWeights(Protocol):
    """The weights that the calls compute with."""

    def changed(self) -> bool:
        """True where they are others than at the last ``write``."""
        ...

    def write(self, *, step: int, version: int) -> None:
        """Write a record for each of them."""
        ...


@dataclass(slots=True)
class _Running:
    call: ForwardCall
    table: RowTable
    history: CacheHistory | None
    grad: bool
    training: bool
    autocast: str | None


class CallBook:
    """Counts steps, calls and weights versions; knows the caches that calls go on from."""

    def __init__(
        self,
        settings: CaptureSettings,
        writer: DumpWriter,
        sink: TensorSink,
        weights: WatchedWeights,
        rows: RowSource,
        end_tokens: frozenset[int],
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._sink = sink
        self._weights = weights
        self.rows = rows
        self._tracker = RowTracker(end_tokens=end_tokens)
        self._caches: dict[int, tuple[weakref.ref[KeyValueCache], CacheHistory]] = {}
        self._running: _Running | None = None
        self._gradients: ForwardCall | None = None
        self.pass_name = settings.pass_name or "forward"
        self.step = 0
        self.weights_version = settings.weights_version or 0
        self.num_calls = 0
        self.counts: dict[str, int] = dict.fromkeys(("rows", "padding", "cached", "discarded", "unknown"), 0)

    def next_step(self, weights_version: int | None) -> None:
        """Go on to the next step of the program."""
        self.step += 1
        self._gradients = None
        if weights_version is not None and weights_version != self.weights_version:
            self.weights_version = weights_version
            self._weights.write(step=self.step, version=weights_version)

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> ForwardCall:
        """A forward call of the root starts."""
        root, table, history = self._identify(module, args, kwargs)
        decode = is_decode(table)
        if not decode and self._weights.changed():
            self.weights_version += 1
            self._weights.write(step=self.step, version=self.weights_version)
        batch, length = root.inputs.batch, root.inputs.length
        if batch * length != len(table.slots):
            batch, length = 1, len(table.slots)
        self.pass_name = self._name_pass(root, decode=decode)
        call = ForwardCall(
            number=self.num_calls,
            step=self.step,
            pass_name=self.pass_name,
            weights_version=self.weights_version,
            batch=batch,
            length=length,
            recorded=self._settings.wants_step(self.step) and not (decode and self._settings.prompts_only),
            every=None,
        )
        self.num_calls += 1
        if table.layout is not RowLayout.UNKNOWN and call.recorded:
            self._write_tables(call, table, root.kept_columns)
        self._running = _Running(
            call=call,
            table=table,
            history=history,
            grad=torch.is_grad_enabled(),
            training=module.training,
            autocast=_autocast_dtype(module),
        )
        return call

    def end(self, output: object) -> None:
        """The root's forward has returned (or failed)."""
        running = self._running
        assert running is not None
        self._running = None
        cache = cache_of_output(output)
        if cache is not None and running.history is not None:
            self._caches[id(cache)] = (weakref.ref(cache), running.history)
        call, table = running.call, running.table
        num_rows = int(np.count_nonzero(table.slots["position"] >= 0))
        for name, count in (
            ("rows", num_rows),
            ("padding", table.counts.padding),
            ("cached", table.counts.cached),
            ("discarded", table.counts.discarded),
            ("unknown", table.counts.unknown),
        ):
            self.counts[name] += count
        record = CallRecord(
            call=call.number,
            step=call.step,
            pass_name=call.pass_name,
            weights_version=call.weights_version,
            layout=table.layout,
            slots=len(table.slots),
            table=call.every.table if call.every else NO_TABLE,
            counts=table.counts,
            training=running.training,
            grad=running.grad,
            autocast=running.autocast,
            note=table.note,
        )
        self._writer.put(call.step, call.pass_name, record)
        self._sink.end_call()

    def gradients(self) -> ForwardCall:
        """The stand-in that parameter gradients of this step are recorded under."""
        if self._gradients is None:
            self._gradients = ForwardCall(
                number=NO_CALL,
                step=self.step,
                pass_name=self.pass_name,
                weights_version=self.weights_version,
                batch=0,
                length=0,
                recorded=self._settings.wants_step(self.step),
                every=None,
            )
        return self._gradients

    def _identify(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[RootCall, RowTable, CacheHistory | None]:
        """Read the call and tell its rows apart; arguments that make no sense cost the keys, not the program."""
        try:
            root = read_root_call(module, args, kwargs)
            table, history = self._rows_of(root, kwargs)
        except (*UNREADABLE, CaptureError) as error:
            self._sink.problem(f"the rows of a forward call could not be read: {error}", call=self.num_calls)
            inputs = CallInputs(tokens_BT=None, batch=1, length=0)
            root = RootCall(inputs=inputs, cache=None, kept_columns=None)
            table, history = self._tracker.from_call(inputs, None)
        return root, table, history

    def _rows_of(self, root: RootCall, kwargs: Mapping[str, object]) -> tuple[RowTable, CacheHistory | None]:
        rows = self.rows() if callable(self.rows) else self.rows
        if rows is not None:
            return self._tracker.from_rows(rows, root.inputs.batch * root.inputs.length), None
        layout = packed_layout(kwargs)
        if layout is not None:
            return self._tracker.from_layout(layout, root.inputs.batch * root.inputs.length), None
        prefixes = named_prefixes(kwargs)
        if prefixes is not None:
            return self._tracker.from_prefixes(prefixes, root.inputs.batch * root.inputs.length), None
        known = self._caches.get(id(root.cache)) if root.cache is not None else None
        history = known[1] if known is not None and known[0]() is root.cache else None
        table, history = self._tracker.from_call(root.inputs, history)
        if root.cache is not None and history is not None:
            self._caches = {key: held for key, held in self._caches.items() if held[0]() is not None}
            self._caches[id(root.cache)] = (weakref.ref(root.cache), history)
        return table, history

    def _name_pass(self, root: RootCall, *, decode: bool) -> str:
        if self._settings.pass_name is not None:
            return self._settings.pass_name
        if decode:
            return "decode"
        if self._settings.side == "rollout" or root.inputs.cached:
            return "prefill"
        return "update" if torch.is_grad_enabled() else "forward"

    def _write_tables(self, call: ForwardCall, table: RowTable, kept_columns: np.ndarray | None) -> None:
        keep = rows_to_keep(table.slots, self._settings.token_range)
        call.every = SlotSubset(table=NO_TABLE, columns=call.length, keep=keep)
        if keep is not None and not keep.size:
            call.recorded = False
            return
        call.every.table = self._write_table(call, table.slots if keep is None else table.slots[keep])
        if kept_columns is not None and call.batch * call.length == len(table.slots):
            slots = table.slots.reshape(call.batch, call.length)[:, kept_columns].reshape(-1)
            keep = rows_to_keep(slots, self._settings.token_range)
            number = self._write_table(call, slots if keep is None else slots[keep])
            call.kept = SlotSubset(table=number, columns=len(kept_columns), keep=keep)

    def _write_table(self, call: ForwardCall, slots: np.ndarray) -> int:
        number = self._sink.take_table()
        words = np.ascontiguousarray(slots).view("<i4").reshape(-1, slots.dtype.itemsize // 4)
        ref = self._sink.write_bytes(
            call.step, call.pass_name, f"rows{number}", "I32", torch.from_numpy(words)  # pyright: ignore[reportUnknownMemberType]
        )  # fmt: skip
        rows = int(np.count_nonzero(slots["position"] >= 0))
        record = RowsRecord(table=number, call=call.number, slots=len(slots), rows=rows, blob=None)
        self._writer.put(call.step, call.pass_name, record, ref)
        return number


def _autocast_dtype(module: nn.Module) -> str | None:
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def end_tokens_of(model: nn.Module) -> frozenset[int]:
    """Ids that end a sequence, by the model's own generation config; a finished entry then only pads."""
    for module in model.modules():
        config = vars(module).get("generation_config")
        if config is not None:
            ids = cast("dict[str, object]", vars(config)).get("eos_token_id")
            return frozenset([ids] if isinstance(ids, int) else cast("list[int]", ids or []))
    return frozenset()
