"""What a dump of msProbe holds and trainfer's own does not: plain arguments, call stacks, the weights of each call.

Hooks a model's modules; gives one ``Call`` for each time one runs, in the order of execution, and hands the weights
over as they are at that moment (gathered, under FSDP). Changes nothing; a recomputation is no call.
"""
# pyright: standard
# (torch's hook types are partial)

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from trainfer.integrations.msprobe.leaf import Leaf, scalar_leaf

Frames = tuple[tuple[str, int, str], ...]
"""(file, line, function), innermost first."""

_MAX_FRAMES = 100
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Call:
    """A module ran."""

    module: str
    parent: int | None
    """Place of the call that it ran inside, in the list of calls."""
    arguments: tuple[tuple[str, Leaf | None], ...]
    """Plain arguments: (``1`` or ``use_cache`` or ``window.0``, leaf)."""
    frames: Frames


KeepParameter = Callable[[str, Tensor], None]
"""Takes (parameter's local name, values) of the latest call, which is about to run."""


class CallWatcher:
    """Hooks on the modules of one model."""

    def __init__(
        self, modules: Mapping[str, nn.Module], keep_parameter: KeepParameter | None, *, stacks: bool
    ) -> None:
        self._names = {id(module): name for name, module in modules.items()}
        self._keep_parameter = keep_parameter
        self._stacks = stacks
        self._running: list[int] = []
        self._versions: dict[str, tuple[int, ...]] = {}
        self.is_open = True
        """False while calls are left out (rounds outside ``token_range``)."""
        self.calls: list[Call] = []
        self._handles: list[RemovableHandle] = []
        for module in modules.values():
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not self.is_open or _is_recompute():
            return
        name = self._names[id(module)]
        self.calls.append(
            Call(
                module=name,
                parent=self._running[-1] if self._running else None,
                arguments=tuple(_plain_arguments(args, kwargs)),
                frames=_frames(sys._getframe(1)) if self._stacks else (),
            )
        )
        self._running.append(len(self.calls) - 1)
        if self._keep_parameter is not None:
            self._keep_parameters(self._keep_parameter, name, module)

    def _after(self, module: nn.Module, _args: object, _output: object) -> None:
        running = self._running
        if running and not _is_recompute() and self.calls[running[-1]].module == self._names[id(module)]:
            running.pop()

    def _keep_parameters(self, keep: KeepParameter, name: str, module: nn.Module) -> None:
        parameters = list(module.named_parameters(recurse=False))
        versions = tuple(_local(parameter)._version for _, parameter in parameters)
        if not parameters or self._versions.get(name) == versions:
            return
        self._versions[name] = versions
        for local, parameter in parameters:
            keep(local, _local(parameter).detach())


def stack_lines(frames: Frames) -> list[str]:
    """As msProbe writes them: file, line, function, and the line of code."""
    return [
        f"File {file}, line {line}, in {name}, \n {linecache.getline(file, line).strip()}"
        for file, line, name in frames
    ]


def _is_recompute() -> bool:
    return torch._C._current_graph_task_id() != -1


def _local(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _frames(frame: FrameType | None) -> Frames:
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def _plain_arguments(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, Leaf | None]]:
    for place, value in enumerate(args):
        yield from _plain(value, str(place), 0)
    for name, value in kwargs.items():
        yield from _plain(value, name, 0)


def _plain(value: object, name: str, depth: int) -> Iterator[tuple[str, Leaf | None]]:
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size) and depth < _MAX_DEPTH:
        for place, item in enumerate(value):
            yield from _plain(item, f"{name}.{place}", depth + 1)
        return
    is_plain, leaf = scalar_leaf(value)
    if is_plain:
        yield name, leaf
