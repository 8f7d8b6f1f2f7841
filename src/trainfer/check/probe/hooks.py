"""Module hooks (level L0): inputs before a module runs, outputs after.

Takes a model; gives tensors to the sink. Hooks return nothing, so nothing changes. A module that runs inside
autograd is being recomputed (activation checkpointing): its values were recorded already, only gradients are new.
"""
# pyright: standard
# (torch's hook types are partial)

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainfer.check.dump.records import Role
from trainfer.check.probe.call import ForwardCall, Place
from trainfer.check.probe.calls import CallBook
from trainfer.check.probe.functions import FunctionWatcher
from trainfer.check.probe.gradients import GradientHooks
from trainfer.check.probe.leaves import argument_leaves, tensor_leaves
from trainfer.check.probe.settings import CaptureSettings
from trainfer.check.probe.sink import TensorSink


@runtime_checkable
class HasHead(Protocol):
    """A causal LM of Transformers."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The output head."""
        ...


@dataclass(slots=True)
class _Frame:
    name: str
    call: ForwardCall
    occurrence: int
    is_recompute: bool
    is_outermost: bool


@dataclass(slots=True)
class _Recompute:
    """Occurrences of modules that run again inside autograd, by call."""

    last_call: dict[str, ForwardCall] = field(default_factory=dict[str, ForwardCall])
    seen: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])

    def occurrence(self, call: ForwardCall, name: str) -> int:
        number = self.seen.get((call.number, name), -1) + 1
        self.seen[call.number, name] = number
        return number


class ModuleHooks:
    """Hooks on the modules of one model; ``fired`` names those that ran."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        chosen: set[str],
        settings: CaptureSettings,
        book: CallBook,
        sink: TensorSink,
        gradients: GradientHooks | None,
    ) -> None:
        self._names = {id(module): name for name, module in modules.items()}
        self._chosen = chosen
        self._settings = settings
        self._book = book
        self._sink = sink
        self._gradients = gradients
        self._frames: list[_Frame] = []
        self._recompute = _Recompute()
        self._told: set[str] = set()
        self._heads = _head_names(modules, self._names)
        self._functions: FunctionWatcher | None = None
        self._may_be_in_a_graph = torch.cuda.is_available()
        self.fired: set[str] = set()
        self._handles: list[RemovableHandle] = []
        # In code that is compiled while the hooks are on, they break the graph and run eagerly.
        before = cast("Callable[..., None]", torch.compiler.disable(self._before))
        after = cast("Callable[..., None]", torch.compiler.disable(self._after))
        for module in modules.values():
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    @property
    def inner_fired(self) -> bool:
        """True where more than the root ran, or there is no more."""
        return len(self.fired) > 1 or len(self._names) == 1

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._leave_functions()

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._in_a_graph():
            return
        name = self._names[id(module)]
        self.fired.add(name)
        frame = self._open(name, module, args, kwargs)
        self._frames.append(frame)
        if frame.is_recompute or not frame.call.recorded or not self._watches(name):
            return
        unknown: list[str] = []
        head = name in self._heads
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            self._record(frame, Role.INPUT, "0", args[0], head=head)
            return
        for where, tensor in argument_leaves(args, kwargs, unknown):
            self._record(frame, Role.INPUT, where, tensor, head=head)

    def _after(self, _module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        if not self._frames or self._in_a_graph():
            return
        frame = self._frames.pop()
        call = frame.call
        if call.recorded and self._watches(frame.name):
            unknown: list[str] = []
            for where, tensor in tensor_leaves(output, "0", unknown):
                head = frame.name in self._heads or (frame.is_outermost and where == "logits")
                if frame.is_recompute:
                    self._watch_gradient(frame, Role.OUTPUT, where, tensor, head=head)
                else:
                    self._record(frame, Role.OUTPUT, where, tensor, head=head)
            self._tell_unknown(frame, unknown)
        if frame.is_outermost and not frame.is_recompute:
            self._leave_functions()
            self._book.end(output)
            if self._gradients is not None:
                self._gradients.end_call()

    def _open(
        self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> _Frame:
        if self._frames:
            above = self._frames[-1]
            occurrence = (
                self._recompute.occurrence(above.call, name)
                if above.is_recompute
                else above.call.occurrence(name)
            )
            self._recompute.last_call[name] = above.call
            return _Frame(name, above.call, occurrence, is_recompute=above.is_recompute, is_outermost=False)
        earlier = self._recompute.last_call.get(name)
        if torch._C._current_graph_task_id() != -1 and earlier is not None:
            return _Frame(
                name, earlier, self._recompute.occurrence(earlier, name), is_recompute=True, is_outermost=True
            )
        call = self._book.begin(module, args, kwargs)
        self._recompute.last_call[name] = call
        if self._settings.level.functions and call.recorded:
            self._functions = FunctionWatcher(self._begin_function, self._deliver_function)
            self._functions.__enter__()
        return _Frame(name, call, call.occurrence(name), is_recompute=False, is_outermost=True)

    def _leave_functions(self) -> None:
        if self._functions is not None:
            self._functions.__exit__(None, None, None)
            self._functions = None

    def _in_a_graph(self) -> bool:
        """True while a CUDA graph is recorded: nothing can be read then, and its replays run no hooks."""
        return self._may_be_in_a_graph and torch.cuda.is_current_stream_capturing()

    def _watches(self, name: str) -> bool:
        return self._settings.level.modules and name in self._chosen

    def _record(self, frame: _Frame, role: Role, where: str, tensor: Tensor, *, head: bool) -> None:
        place = Place(frame.name, frame.occurrence, None, role, where)
        self._sink.record(frame.call, place, tensor, head=head)
        if self._gradients is not None and tensor.requires_grad:
            self._gradients.watch(frame.call, place, tensor, head=head)

    def _watch_gradient(self, frame: _Frame, role: Role, where: str, tensor: Tensor, *, head: bool) -> None:
        if self._gradients is not None and tensor.requires_grad:
            place = Place(frame.name, frame.occurrence, None, role, where)
            self._gradients.watch(frame.call, place, tensor, head=head)

    def _tell_unknown(self, frame: _Frame, unknown: list[str]) -> None:
        for kind in unknown:
            if kind not in self._told:
                self._told.add(kind)
                self._sink.problem(
                    f"outputs of type {kind} cannot be captured", module=frame.name, call=frame.call.number
                )

    def _begin_function(self, function: str) -> int | None:
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.name not in self._chosen:
            return None
        return frame.call.occurrence(f"{frame.name}|{function}")

    def _deliver_function(
        self, function: str, role: Role, where: str, tensor: Tensor, occurrence: int
    ) -> None:
        frame = self._frames[-1]
        place = Place(frame.name, occurrence, function, role, where)
        self._sink.record(frame.call, place, tensor, head=frame.name in self._heads)
        if self._gradients is not None and tensor.requires_grad:
            self._gradients.watch(frame.call, place, tensor, head=False)


def _head_names(modules: Mapping[str, nn.Module], names: Mapping[int, str]) -> frozenset[str]:
    found: set[str] = set()
    for module in modules.values():
        if isinstance(module, HasHead):
            head = module.get_output_embeddings()
            if head is not None and id(head) in names:
                found.add(names[id(head)])
    return frozenset(found)
