"""One forward pass in which every module is given what a side's module was given.

Takes a model in high precision, a sequence and a side's captured rows; gives, for every place in the model, what was
computed there from captured values and what was captured. Every module's inputs and outputs are replaced by captured
ones as the pass goes on, so a difference belongs to the one piece of code between two captured places: to the module itself
where its output is off, to its parent's code where the input of a child is off. Errors that came in do not show.
"""
# pyright: standard
# (hooks are untyped in torch)

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainfer.check.align.names import parent_of
from trainfer.check.replay.trials_rows import CapturedRows

Place = tuple[str, str, str]
"""Module, ``input`` or ``output``, part (as in ``align.points``)."""

Captured = Callable[[str, int, str, str], CapturedRows | None]
"""(module, occurrence, direction, part) -> what a side captured there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One place of the pass.

    Axes: T tokens, D features.
    """

    owner: str
    """The module whose own code lies between captured values and this place."""
    computed_TD: Tensor
    captured_TD: Tensor | None
    known_T: Tensor
    """False: nothing captured, and the computed value was used."""
    dtype: str

    @property
    def used_TD(self) -> Tensor:
        """What the following code was given."""
        if self.captured_TD is None:
            return self.computed_TD
        return torch.where(self.known_T[:, None], self.captured_TD, self.computed_TD)

    @property
    def error_T(self) -> Tensor:
        """‖captured − computed‖ / ‖computed‖; 0 where nothing was captured, inf where either is not finite."""
        if self.captured_TD is None:
            return torch.zeros(len(self.known_T), dtype=torch.float64)
        off = torch.linalg.vector_norm(self.captured_TD - self.computed_TD, dim=1)
        size = torch.linalg.vector_norm(self.computed_TD, dim=1).clamp_min(1e-30)
        error = torch.where(self.known_T, off / size, torch.zeros_like(off))
        return torch.nan_to_num(error, nan=torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """All places of one pass that were kept, in the order of execution."""

    label: int
    seen: Mapping[Place, Seen]

    def at(self, module: str, direction: str, part: str | None = None) -> Seen | None:
        """One place."""
        return self.seen.get((module, direction, part or direction))


@dataclass(slots=True)
class _Pass:
    """State of one pass while its hooks run."""

    captured: Captured
    length: int
    runs: Counter[str] = field(default_factory=Counter)
    seen: dict[Place, Seen] = field(default_factory=dict)
    known_owners: frozenset[str] = frozenset()

    def replace(self, name: str, direction: str, part: str, tensor: Tensor) -> Tensor:
        layout = row_dim(tensor, self.length)
        if layout is None:
            return tensor
        occurrence = self.runs[name] - (direction == "output")
        found = self.captured(name, occurrence, direction, part)
        rows = to_rows(tensor, layout)
        matches = found is not None and found.values_TD.shape == rows.shape
        owner = name if direction == "output" else self._owner(name)
        seen = Seen(
            owner=owner,
            computed_TD=rows,
            captured_TD=found.values_TD if matches and found is not None else None,
            known_T=found.known_T
            if matches and found is not None
            else torch.zeros(self.length, dtype=torch.bool),
            dtype=found.dtype if found is not None else "",
        )
        if occurrence == 0:
            self.seen[name, direction, part] = seen
        return from_rows(seen.used_TD, tensor, layout) if matches else tensor

    def _owner(self, name: str) -> str:
        parent = parent_of(name)
        while parent and parent not in self.known_owners:
            parent = parent_of(parent)
        return parent


def row_dim(tensor: Tensor, length: int) -> int | None:
    """The dimension that runs over tokens, batch entries being one."""
    if not tensor.is_floating_point():
        return None
    if tensor.dim() == 2 and tensor.shape[0] == length:
        return 0
    if tensor.dim() < 3 or tensor.shape[0] != 1:
        return None
    return next((dim for dim in (1, 2) if dim < tensor.dim() - 1 and tensor.shape[dim] == length), None)


def to_rows(tensor: Tensor, dim: int) -> Tensor:
    """``[T, D]`` in float64."""
    return tensor.detach().double().movedim(dim, 0).reshape(tensor.shape[dim], -1)


def from_rows(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """The inverse of ``to_rows``, in the dtype of ``like``."""
    moved = like.movedim(dim, 0)
    return rows.reshape(moved.shape).movedim(0, dim).to(like.dtype)


def first_float(values: Sequence[Any]) -> int | None:
    """Place of the first float tensor."""
    return next((i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()), None)


@torch.no_grad()
def forced_pass(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    tokens: Sequence[int],
    captured: Captured,
    *,
    label: int,
    keep: Callable[[str], bool] = lambda _: True,
) -> Trace:
    """Run one sequence.

    Args:
        model: In high precision, in evaluation mode; called with ids and true positions.
        modules: Canonical name -> module.
        tokens: The whole sequence.
        captured: A side's rows.
        label: Of the sequence; goes into the trace.
        keep: Modules that are given captured values and whose places are kept; the others run as they are.
    """
    state = _Pass(captured=captured, length=len(tokens), known_owners=frozenset(modules))
    handles = []
    for name, module in modules.items():
        if not name or not keep(name):
            continue
        handles.append(module.register_forward_pre_hook(_before(state, name), with_kwargs=True))
        handles.append(module.register_forward_hook(_after(state, name)))
    try:
        run_model(model, tokens)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(label=label, seen=state.seen)


def run_model(model: nn.Module, tokens: Sequence[int]) -> Any:
    """The plain forward of one sequence: ids and positions from 0, no cache."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    positions = torch.arange(len(tokens), device=device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False)


def _before(state: _Pass, name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = first_float(args)
        if place is not None:
            changed = state.replace(name, "input", "input", args[place])
            args = (*args[:place], changed, *args[place + 1 :])
        else:
            names = list(kwargs)
            place = first_float(list(kwargs.values()))
            if place is not None and "mask" not in names[place]:
                key = names[place]
                kwargs = {**kwargs, key: state.replace(name, "input", "input", kwargs[key])}
        state.runs[name] += 1
        return args, kwargs

    return hook


def _after(state: _Pass, name: str) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return state.replace(name, "output", "output", output)
        if type(output) is tuple:
            main = first_float(output)
            return tuple(
                state.replace(name, "output", "output" if i == main else str(i), value)
                if isinstance(value, Tensor)
                else value
                for i, value in enumerate(output)
            )
        return output

    return hook
