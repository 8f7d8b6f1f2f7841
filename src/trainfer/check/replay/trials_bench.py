"""Where trials are made: the model in float64, both sides' rows, one forced pass a sequence and side.

Takes two sides put together and the model; gives traces, sites, cores of attention, and the log-probs of the model with
errors added where they arose. The model is copied once, in float64; sequences are taken in order up to a bound.
"""
# pyright: standard
# (modules are untyped in torch)

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainfer.check.align.names import canonical, parent_of
from trainfer.check.align.points import Point, Source
from trainfer.check.compare.joined import JoinedSides
from trainfer.check.dump.records import ModuleEntry, SequenceRecord
from trainfer.check.probe.names import named_modules
from trainfer.check.replay.clones import plain_config
from trainfer.check.replay.trials_forced import Place, Trace, forced_pass, from_rows, row_dim, run_model
from trainfer.check.replay.trials_rows import MAX_TOKENS, CapturedRows, SideRows
from trainfer.check.replay.trials_sites import Site

SIDES = ("rollout", "train")
MAX_SEQUENCES = 12

_EXITS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_ENTRIES = ("q_proj", "k_proj", "v_proj", "c_attn", "qkv_proj", "query_key_value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Graft:
    """Errors added at a place of the model, by sequence: ``[T, D]``."""

    places: tuple[Place, ...]
    errors: Mapping[int, Tensor]


class Bench:
    """Two sides and the model."""

    def __init__(self, joined: JoinedSides, model: nn.Module) -> None:
        self.joined = joined
        self.model = copy.deepcopy(model).to(torch.float64).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)  # noqa: FBT003
        for module in self.model.modules():
            config = vars(module).get("config")
            if "_experts_implementation_internal" in vars(config or object):
                vars(module)["config"] = plain_config(config)
        self.modules = {canonical(n, joined.names): m for n, m in named_modules(self.model).items()}
        self.rows = _side_rows(joined, 0), _side_rows(joined, 1)
        self.records = _records(joined)
        self.labels = tuple(self.records)
        self.entries: tuple[dict[str, ModuleEntry], dict[str, ModuleEntry]] = (
            _entries(joined, 0),
            _entries(joined, 1),
        )
        self._clean: dict[int, Tensor] = {}

    def version(self, label: int, side: int) -> int:
        """Weights version of a sequence on a side, as a number that both share."""
        own = self.records[label][side].weights_version
        return self.joined.weights.versions[side].get(own, -2 - own)

    def traces(self, side: int, keep: Callable[[str], bool]) -> tuple[Trace, ...]:
        """A forced pass over every sequence, keeping some modules' places."""
        found: list[Trace] = []
        for label in self.labels:
            tokens = self.records[label][side].tokens
            captured = self._captured(side, label, tokens)
            found.append(forced_pass(self.model, self.modules, tokens, captured, label=label, keep=keep))
        return tuple(found)

    def _captured(self, side: int, label: int, tokens: Sequence[int]):
        version = self.version(label, side)

        def find(module: str, occurrence: int, direction: str, part: str) -> CapturedRows | None:
            point = Point(
                module=module,
                function="",
                occurrence=occurrence,
                phase="forward",
                direction=direction,
                part=part,
            )
            return self.rows[side].captured(point, tokens, label, version)

        return find

    def kind(self, module: str) -> str:
        """What a module computes."""
        layer = self.modules.get(module)
        if layer is None:
            return "other"
        if self.exit_of(module) is not None:
            return "attention"
        name, leaf = type(layer).__name__.lower(), module.rpartition(".")[2]
        weight = getattr(layer, "weight", None)
        for kind, fits in (
            ("rotary", "rotary" in leaf or isinstance(getattr(layer, "inv_freq", None), Tensor)),
            ("dropout", isinstance(layer, nn.Dropout)),
            ("norm", "norm" in name),
            ("embedding", isinstance(layer, nn.Embedding)),
            ("router", leaf in ("gate", "router") and self.has_router(module)),
            ("head", leaf in ("lm_head", "output_layer") and isinstance(weight, Tensor)),
            ("linear", isinstance(weight, Tensor) and weight.dim() == 2),
        ):
            if fits:
                return kind
        return "other"

    def has_router(self, module: str) -> bool:
        """True for a block with experts, and for what lies in it."""
        parents = {parent_of(n) for n in self.modules if n.rpartition(".")[2] in ("experts", "router")}
        return module in parents or (module.rpartition(".")[2] == "gate" and parent_of(module) in parents)

    def exit_of(self, module: str) -> str | None:
        """The output projection of an attention module; None where it is none."""
        children = [name for name in self.modules if parent_of(name) == module and name]
        leaves = {name.rpartition(".")[2]: name for name in children}
        if not any(entry in leaves for entry in _ENTRIES):
            return None
        return next((leaves[leaf] for leaf in _EXITS if leaf in leaves), None)

    def site(self, module: str, side: int, floor: float) -> Site | None:
        """A module's place on one side; None where nothing of it was captured there."""
        kind = self.kind(module)
        traces = self.traces(side, self._relevant(module))
        places = self._places(module, kind, traces)
        if not places:
            return None
        entry = self.entries[side].get(module)
        return Site(
            module=module,
            kind=kind,
            side=SIDES[side],
            layer=self.modules[module],
            places=places,
            traces=traces,
            floor=floor,
            attributes=entry.attributes if entry is not None else {},
            training=entry.training if entry is not None else False,
            root=self.model,
        )

    def _relevant(self, module: str) -> Callable[[str], bool]:
        rotary = {name for name in self.modules if "rotary" in name.rpartition(".")[2]}
        near = {name for name in self.modules if parent_of(name) == module or name == module}
        inside = {name for name in self.modules if parent_of(parent_of(name)) == module}
        return lambda name: name in near or name in rotary or (len(inside) < 64 and name in inside)

    def _places(self, module: str, kind: str, traces: Sequence[Trace]) -> tuple[Place, ...]:
        if not traces:
            return ()
        seen = traces[0].seen
        if kind == "attention":
            place = (self.exit_of(module) or "", "input", "input")
            return (place,) if place in seen and seen[place].captured_TD is not None else ()
        if kind == "rotary":
            found = [p for p in ((module, "output", "output"), (module, "output", "1")) if p in seen]
            return tuple(found) if len(found) == 2 else ()
        owned = [
            place for place, item in seen.items() if item.owner == module and item.captured_TD is not None
        ]
        own = (module, "output", "output")
        worst = max(owned, key=lambda place: _worst(traces, place), default=None)
        if worst is None:
            return ()
        is_leaf = own in owned and all(place[0] == module for place in owned)
        return (own if is_leaf and 2 * _worst(traces, own) >= _worst(traces, worst) else worst,)

    def logprobs(self, label: int, grafts: Iterable[Graft]) -> Tensor:
        """Log-probs of the response tokens under the model with errors added, float64 ``[response]``."""
        used = [graft for graft in grafts if label in graft.errors]
        if not used and label in self._clean:
            return self._clean[label]
        record = self.records[label][0]
        handles = [h for graft in used for h in self._hooks(graft, label, len(record.tokens))]
        try:
            with torch.no_grad():
                logits = run_model(self.model, record.tokens).logits[0].double()
        finally:
            for handle in handles:
                handle.remove()
        start = record.prompt_length
        targets = torch.tensor(record.tokens[start:])
        temperature = float(record.sampling.get("temperature", 1.0)) or 1.0
        scored = torch.log_softmax(logits[start - 1 : -1] / temperature, dim=-1)
        result = scored.gather(1, targets[:, None])[:, 0]
        if not used:
            self._clean[label] = result
        return result

    def _hooks(self, graft: Graft, label: int, length: int) -> list[torch.utils.hooks.RemovableHandle]:
        errors = graft.errors[label]
        handles, start = [], 0
        widths = self._widths(graft, errors)
        for (module, direction, part), width in zip(graft.places, widths, strict=True):
            add = errors[:, start : start + width]
            start += width
            layer = self.modules[module]
            if direction == "input":
                handles.append(layer.register_forward_pre_hook(_add_to_input(add, length), with_kwargs=True))
            else:
                handles.append(layer.register_forward_hook(_add_to_output(add, length, part)))
        return handles

    @staticmethod
    def _widths(graft: Graft, errors: Tensor) -> list[int]:
        return [errors.shape[1] // len(graft.places)] * len(graft.places)


def _worst(traces: Sequence[Trace], place: Place) -> float:
    return max(
        (float(trace.seen[place].error_T.max()) for trace in traces if place in trace.seen), default=0.0
    )


def _added(tensor: Tensor, errors: Tensor, length: int) -> Tensor:
    dim = row_dim(tensor, length)
    if dim is None or tensor.numel() != errors.numel():
        return tensor
    return tensor + from_rows(errors, tensor, dim)


def _add_to_output(errors: Tensor, length: int, part: str):
    def hook(_module: nn.Module, _args: object, output: object) -> object:
        if isinstance(output, Tensor):
            return _added(output, errors, length)
        if type(output) is tuple:
            place = 0 if part == "output" else int(part) if part.isdigit() else -1
            return tuple(_added(v, errors, length) if i == place else v for i, v in enumerate(output))
        return output

    return hook


def _add_to_input(errors: Tensor, length: int) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (_added(args[0], errors, length), *args[1:]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                return args, {**kwargs, name: _added(value, errors, length)}
        return args, kwargs

    return hook


def _side_rows(joined: JoinedSides, side: int) -> SideRows:
    sources: dict[Point, tuple[Source, ...]] = {**joined.points[side].extra, **joined.points[side].sources}
    for pair in joined.join.pairs:
        sources[pair.point] = pair.rollout if side == 0 else pair.train
    return SideRows(
        joined.sides[side],
        sources,
        joined.raw[side],
        joined.tokens.labels[side],
        joined.weights.versions[side],
    )


def _records(joined: JoinedSides) -> dict[int, tuple[SequenceRecord, SequenceRecord]]:
    """Sequences that both sides have, those that share no prompt with an earlier one first, up to the bound."""
    rollout, train = joined.tokens.sequences
    found: dict[int, tuple[SequenceRecord, SequenceRecord]] = {}
    room = MAX_TOKENS
    for pair in joined.tokens.join.pairs:
        size = len(rollout[pair.rollout].tokens)
        if not pair.equal or pair.rollout in found or size < 2 or (size > room and found):
            continue
        found[pair.rollout] = (rollout[pair.rollout], train[pair.train])
        room -= size
        if len(found) >= MAX_SEQUENCES:
            break
    return found


def _entries(joined: JoinedSides, side: int) -> dict[str, ModuleEntry]:
    return {canonical(entry.name, joined.names): entry for entry in joined.sides[side].manifest.modules}
