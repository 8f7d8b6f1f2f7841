"""Runs one module of the model on rows that one side captured, in float64 or as the side ran it.

Takes addresses of rows; gives what the module computes for them: its result, and what it hands to each of its parts.
Parts whose results were captured are not run: their captured results are handed on in their place, so what is left
is what the module does itself (residual sums, rotation, attention between the projections).
"""
# pyright: standard
# (torch's own types are partial)

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from trainfer.check.align.points import Point
from trainfer.check.dump.tensors import rows_first
from trainfer.check.probe.leaves import argument_leaves, tensor_leaves
from trainfer.check.replay.attention import causal_mask, sequences_of
from trainfer.check.replay.calls import CallTemplate, Leaf, filled, place_rows
from trainfer.check.replay.clones import clone
from trainfer.check.replay.inputs import Captured, place
from trainfer.check.replay.modules import is_attention, window_of
from trainfer.check.replay.reference import SideWeights
from trainfer.check.replay.rows import Addresses, MissingRowsError, SideRows
from trainfer.check.replay.wide import Wide

OUTPUT = "output"
"""The place that a module's own result is; ``output 1`` is another tensor beside it."""
MAX_SCORES = 1 << 28
"""Attention scores (heads times tokens squared) that are held at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The model that both sides are replayed with."""

    modules: Mapping[str, nn.Module]
    calls: Mapping[str, CallTemplate]
    operators: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    """Direct parts of each module, in the order of definition."""
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How a module is run."""

    wide: bool = True
    """In float64, nothing rounded in between; else in the side's own dtype."""
    attention: str = "eager"
    autocast: torch.dtype | None = None


def part_names(leaves: Sequence[Leaf], direction: str) -> Iterator[tuple[Leaf, str]]:
    """Each leaf with the part that ``align.points`` knows it by; masks are left out."""
    main, index = False, False
    for leaf in leaves:
        if "mask" in leaf.argument:
            continue
        if leaf.is_float and not main:
            main = True
            yield leaf, direction if leaf.name != "logits" else "logits"
        elif not leaf.is_float and not index:
            index = True
            yield leaf, "index"
        else:
            yield leaf, leaf.name


class Stub(nn.Module):
    """Stands for a part whose results were captured; keeps what it is given."""

    def __init__(self, template: CallTemplate, given: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._template = template
        self._given = given
        self.taken: list[Tensor] = []

    def forward(self, *args: object, **kwargs: object) -> object:
        """The captured result of this call."""
        leaves = {leaf.name: leaf for leaf in self._template.inputs}
        found = [
            (leaves[name], t)
            for name, t in argument_leaves(args, kwargs, [])
            if name in leaves and leaves[name].dims is not None and "mask" not in leaves[name].argument
        ]
        found.sort(key=lambda item: not item[0].is_float)
        if found:
            leaf, tensor = found[0]
            assert leaf.dims is not None
            self.taken.append(rows_first(tensor, leaf.dims))
            if len(self.taken) > 1:
                raise MissingRowsError("a part of it runs more than once within one call")
        return filled(self._template.output, self._given, "0")


@dataclass(kw_only=True, slots=True)
class Prepared:
    """What was found out about one module on one side."""

    stubs: tuple[str, ...]
    whole_sequences: bool
    tensors: tuple[str, ...] = field(default=())
    """Names of the parameters that are left."""


class SideExecutor:
    """Runs modules on one side's rows."""

    def __init__(
        self, reference: Reference, captured: Captured, rows: SideRows, weights: SideWeights
    ) -> None:
        self.reference, self.captured, self.rows, self.weights = reference, captured, rows, weights

    def prepare(self, name: str) -> Prepared:
        """Which parts of a module are taken from the capture, and whether its rows meet.

        Raises:
            MissingRowsError: the short run never called it.
        """
        if name not in self.reference.calls:
            raise MissingRowsError("the model does not call it by itself")
        if self.reference.calls[name].runs > 1:
            raise MissingRowsError("it runs more than once in one call")
        stubs = tuple(self._stubs(name))
        left = [name, *self._left(name, stubs)]
        tensors = tuple(
            f"{part}.{local}" if part else local
            for part in left
            for local, tensor in self.reference.modules[part]._parameters.items()
            if tensor is not None
        )
        meets = any(is_attention(self.reference.modules[part]) for part in left)
        return Prepared(stubs=stubs, whole_sequences=meets, tensors=tensors)

    def _stubs(self, name: str) -> Iterator[str]:
        for part in self.reference.parts.get(name, ()):
            if part in self.reference.calls and self._has_outputs(part):
                yield part
            else:
                yield from self._stubs(part)

    def _left(self, name: str, stubs: tuple[str, ...]) -> Iterator[str]:
        for part in self.reference.parts.get(name, ()):
            if part not in stubs:
                yield part
                yield from self._left(part, stubs)

    def _has_outputs(self, name: str) -> bool:
        """The first result was captured, as wide as the model's own."""
        template = self.reference.calls[name]
        if template.runs > 1:
            return False
        for leaf, part in part_names(template.outputs, "output"):
            if leaf.is_float and leaf.dims is not None:
                sources = self.captured.sources(place(name, "output", part))
                return bool(sources) and sources[0].width == leaf.width
        return False

    def run(self, name: str, prepared: Prepared, addresses: Addresses, manner: Manner) -> dict[str, Tensor]:
        """Place -> ``[n, width]``: the result under ``OUTPUT``, and what each stubbed part is given under its name.

        Raises:
            MissingRowsError: an input was not captured.
        """
        if not prepared.whole_sequences:
            return self._call(name, prepared, addresses, manner)
        collected: dict[str, Tensor] = {}
        for sequence in sequences_of(self.rows, addresses):
            found = self._call(name, prepared, sequence.rows, manner)
            take, put = torch.from_numpy(sequence.positions), torch.from_numpy(sequence.asked)
            for key, values in found.items():
                if key not in collected:
                    collected[key] = values.new_empty((len(addresses), values.shape[1]))
                collected[key][put] = values[take]
        return collected

    def _call(self, name: str, prepared: Prepared, addresses: Addresses, manner: Manner) -> dict[str, Tensor]:
        template = self.reference.calls[name]
        if prepared.whole_sequences:
            self._check_size(name, len(addresses))
        stubs = {part: self._stub(part, addresses, manner) for part in prepared.stubs}
        module = clone(
            self.reference.modules[name],
            name,
            stubs,
            lambda full, tensor: self._converted(full, tensor, manner),
            attention=manner.attention,
        )
        args, kwargs = self._arguments(name, template, prepared, addresses, manner)
        with torch.no_grad(), self._precision(manner):
            output = module(*args, **kwargs)
        return _places(template, output, stubs, len(addresses))

    def _check_size(self, name: str, length: int) -> None:
        heads = 1
        for part in (name, *self._left(name, ())):
            config = vars(self.reference.modules[part]).get("config")
            heads = max(heads, int(getattr(config, "num_attention_heads", 1) or 1))
        if heads * length * length > MAX_SCORES:
            raise MissingRowsError(f"too large: {heads} heads of {length} x {length} scores in float64")

    def _precision(self, manner: Manner) -> contextlib.AbstractContextManager[object]:
        if manner.wide:
            return Wide()
        if manner.autocast is not None:
            return torch.autocast(self.reference.device.type, dtype=manner.autocast)
        return contextlib.nullcontext()

    def _converted(self, name: str, tensor: Tensor, manner: Manner) -> Tensor:
        own = self.weights.tensor(name, tensor)
        return own.double() if manner.wide and own.is_floating_point() else own

    def _stub(self, name: str, addresses: Addresses, manner: Manner) -> Stub:
        template = self.reference.calls[name]
        given: dict[str, Tensor | None] = {}
        for leaf, part in part_names(template.outputs, "output"):
            sources = self.captured.by_call(place(name, "output", part))
            if leaf.dims is None or not sources:
                given[leaf.name] = None
                continue
            try:
                rows = self.rows.fetch(sources, addresses, f"{name}'s output {leaf.name}")
                given[leaf.name] = self._placed(rows, leaf, manner)
            except MissingRowsError:
                if part == "output":
                    raise
                given[leaf.name] = None  # attention weights, say: whoever needs them after all cannot be run
        return Stub(template, given)

    def _placed(self, rows: Tensor, leaf: Leaf, manner: Manner) -> Tensor:
        if rows.shape[1] != leaf.width:
            raise MissingRowsError(f"{leaf.name} has {rows.shape[1]} features, the model's {leaf.width}")
        rows = rows.to(self.reference.device)
        wide = rows.double() if manner.wide and rows.is_floating_point() else rows
        return place_rows(wide, leaf)

    def _arguments(
        self, name: str, template: CallTemplate, prepared: Prepared, addresses: Addresses, manner: Manner
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        tensors: dict[str, Tensor | None] = {}
        for leaf, part in part_names(template.inputs, "input"):
            tensors[leaf.argument] = self._input(name, leaf, part, addresses, manner)
        if not manner.wide:
            tensors = _in_one_dtype(tensors)
        args = tuple(filled(value, tensors, str(number), 1) for number, value in enumerate(template.args))
        kwargs = {key: filled(value, tensors, key, 1) for key, value in template.kwargs.items()}
        for key in [key for key in kwargs if "mask" in key]:
            kwargs[key] = None
        if prepared.whole_sequences and self.reference.operators[name] in ("attention", "layer"):
            floats = [t.dtype for t in tensors.values() if t is not None and t.is_floating_point()]
            kwargs["attention_mask"] = self._mask(name, len(addresses), floats[0])
        if "position_ids" in template.accepts and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = self._positions(addresses)[None]
        return args, kwargs

    def _mask(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        module = self.reference.modules[name]
        attention = next(part for part in module.modules() if is_attention(part))
        return causal_mask(length, window_of(attention), dtype, self.reference.device)

    def _positions(self, addresses: Addresses) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(addresses.positions)).to(self.reference.device)

    def _input(self, name: str, leaf: Leaf, part: str, addresses: Addresses, manner: Manner) -> Tensor | None:
        if leaf.argument == "position_ids":
            return self._positions(addresses)[None]
        if leaf.dims is None:
            raise MissingRowsError(f"its input {leaf.argument} has no rows")
        if leaf.offset is not None:
            return place_rows(self._positions(addresses)[:, None] + leaf.offset, leaf)
        for point in self._places_of(name, leaf.argument, part):
            sources = self.captured.by_call(point)
            if sources:
                rows = self.rows.fetch(sources, addresses, f"{name}'s input {leaf.name}")
                return self._placed(rows, leaf, manner)
        if leaf.argument.startswith("position_embeddings."):
            return self._rotary(int(leaf.argument.rpartition(".")[2]), addresses, manner)
        raise MissingRowsError(f"its input {leaf.argument} was not captured in the {self.captured.label}")

    def input_rows(self, name: str, addresses: Addresses) -> Tensor:
        """A module's first float input, ``[n, width]`` as stored."""
        for leaf, part in part_names(self.reference.calls[name].inputs, "input"):
            if leaf.is_float:
                sources = self.captured.by_call(place(name, "input", part))
                return self.rows.fetch(sources, addresses, f"{name}'s input").to(self.reference.device)
        raise MissingRowsError("it takes no float tensor")

    def _places_of(self, name: str, argument: str, part: str) -> Iterator[Point]:
        yield place(name, "input", part)
        if argument.startswith("position_embeddings."):
            number = argument.rpartition(".")[2]
            rotary = self._rotary_name()
            if rotary is not None:
                yield place(rotary, "output", "output" if number == "0" else number)

    def _rotary_name(self) -> str | None:
        found = [name for name, operator in self.reference.operators.items() if operator == "rope"]
        return found[0] if len(found) == 1 else None

    def _rotary(self, number: int, addresses: Addresses, manner: Manner) -> Tensor:
        """Cosines and sines of the model itself, where the side turns queries and keys otherwise."""
        name = self._rotary_name()
        if name is None:
            raise MissingRowsError("cosines and sines were not captured")
        module = clone(
            self.reference.modules[name], name, {}, lambda full, t: self._converted(full, t, manner)
        )
        like = torch.empty(1, len(addresses), 1, dtype=torch.float64, device=self.reference.device)
        with torch.no_grad(), self._precision(manner):
            found = module(like, self._positions(addresses)[None])
        return [tensor for _, tensor in tensor_leaves(found, "0", [])][number]


def _in_one_dtype(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Cosines and sines that were not captured come in float64: here they get the dtype of what is turned by them."""
    floats = [t.dtype for t in tensors.values() if t is not None and t.is_floating_point()]
    own = next((dtype for dtype in floats if dtype is not torch.float64), None)
    return {
        name: t.to(own) if t is not None and t.dtype is torch.float64 and own is not None else t
        for name, t in tensors.items()
    }


def _places(
    template: CallTemplate, output: object, stubs: Mapping[str, Stub], count: int
) -> dict[str, Tensor]:
    leaves = {leaf.name: leaf for leaf in template.outputs}
    found: dict[str, Tensor] = {}
    for name, tensor in tensor_leaves(output, "0", []):
        leaf = leaves.get(name)
        if leaf is None or leaf.dims is None or not tensor.is_floating_point():
            continue
        if OUTPUT not in found:
            found[OUTPUT] = rows_first(tensor, leaf.dims)
        elif leaf.has_rows_alone:
            found[f"{OUTPUT} {name}"] = rows_first(tensor, leaf.dims)
    for part, stub in stubs.items():
        if stub.taken and len(stub.taken[0]) == count:
            found[part] = stub.taken[0]
    return found
