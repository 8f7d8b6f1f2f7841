"""Hooks on the modules of a vLLM model: what each takes and gives in a real step, and nothing of warm-ups.

Takes the step that the runner works on; gives tensors to the sink. Unlike a Transformers model, vLLM's gives
no logits: its ``logits_processor`` runs after the model has returned, on the last row of each request. So a call stays
open until the step is over, and its logits are written as the model's, as Transformers has it. The inner model
(``model``) is called past its hooks, so what the root takes and gives is written under its name.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainfer.check.dump.records import Role
from trainfer.check.probe.call import ForwardCall, Place
from trainfer.check.probe.calls import CallBook
from trainfer.check.probe.gradients import GradientHooks
from trainfer.check.probe.leaves import argument_leaves, tensor_leaves
from trainfer.check.probe.settings import CaptureSettings
from trainfer.check.probe.sink import TensorSink

HEAD = "logits_processor"
OUTSIDE = frozenset({HEAD, "lm_head"})
"""Modules beside the inner model."""


class Step(Protocol):
    """The step that the runner works on, as the hooks see it."""

    def starts(self, token_ids: Tensor | None) -> list[int] | None:
        """The model is called; rows whose logits are sampled from, None where this call is not captured."""
        ...

    def guarded(self, work: Callable[[], None]) -> None:
        """Do it; an error ends the capture, not the run."""
        ...


class StepHooks:
    """Hooks on one model; made by ``session`` as ``check.probe.capture.Means`` asks."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        chosen: set[str],
        settings: CaptureSettings,
        book: CallBook,
        sink: TensorSink,
        gradients: GradientHooks | None,
        *,
        step: Step,
    ) -> None:
        assert gradients is None
        assert settings.level.modules
        self._book, self._sink, self._step, self._chosen = book, sink, step, chosen
        self._call: ForwardCall | None = None
        self._num_logits = 0
        self._has_logits = False
        self._output: object = None
        self._open: list[tuple[str, int]] = []
        self._told: set[str] = set()
        self._inner = next((name for name in modules if name and name not in OUTSIDE), "")
        self.fired: set[str] = set()
        self._handles: list[RemovableHandle] = []
        for name, module in modules.items():
            before, after = self._hooks(name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    @property
    def inner_fired(self) -> bool:
        """True where more than the root and the head ran: under compilation those two run alone."""
        return len(self.fired - {"", HEAD}) > 0

    @property
    def has_logits(self) -> bool:
        """True once the head of this step has run."""
        return self._has_logits

    def end_step(self) -> None:
        """The step is over."""
        call, self._call = self._call, None
        self._open.clear()
        output, self._output = self._output, None
        if call is not None:
            self._book.end(output)

    def close(self) -> None:
        """Remove the hooks."""
        self.end_step()
        for handle in self._handles:
            handle.remove()

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
            if self._call is not None or name == "":
                self._step.guarded(lambda: self._before(name, _module, args, kwargs))

        def after(_module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
            if self._call is not None:
                self._step.guarded(lambda: self._after(name, output))

        return before, after

    def _before(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if name == "":
            self._begin(module, args, kwargs)
        call = self._call
        if call is None:
            return
        if name == HEAD and not self._is_sampled(args, kwargs):
            return
        self.fired.add(name)
        occurrence = call.occurrence(name)
        self._open.append((name, occurrence))
        for where, tensor in argument_leaves(args, kwargs, []):
            self._record(call, name, occurrence, Role.INPUT, where, tensor)
            if name == "":
                self._record(call, self._inner, 0, Role.INPUT, where, tensor)

    def _after(self, name: str, output: object) -> None:
        call = self._call
        assert call is not None
        if not self._open or self._open[-1][0] != name:
            return
        _, occurrence = self._open.pop()
        unknown: list[str] = []
        of = self._inner if name == "" else name
        for where, tensor in tensor_leaves(output, "0", unknown):
            if name or self._inner not in self.fired:
                self._record(call, of, occurrence, Role.OUTPUT, where, tensor)
            if name == HEAD:
                self._record(call, "", 0, Role.OUTPUT, "logits", tensor)
        for kind in unknown:
            if kind not in self._told:
                self._told.add(kind)
                self._sink.problem(
                    f"outputs of type {kind} cannot be captured", module=name, call=call.number
                )
        if name == "":
            self._output = output

    def _record(
        self, call: ForwardCall, name: str, occurrence: int, role: Role, where: str, tensor: Tensor
    ) -> None:
        if call.recorded and name in self._chosen:
            is_head = name == HEAD or where == "logits"
            self._sink.record(call, Place(name, occurrence, None, role, where), tensor, head=is_head)

    def _begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        self.end_step()
        ids = kwargs.get("input_ids", args[0] if args else None)
        ids = ids if isinstance(ids, Tensor) else None
        rows = self._step.starts(ids)
        if rows is None:
            return
        self._num_logits, self._has_logits = len(rows), False
        given: dict[str, object] = {"input_ids": ids} if ids is not None else dict(kwargs)
        given["logits_to_keep"] = torch.tensor(rows, dtype=torch.int64)
        self._call = self._book.begin(module, () if ids is not None else args, given)

    def _is_sampled(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """False for the logits of prompt log-probs, which come from other rows."""
        rows = [tensor.shape[0] for _, tensor in argument_leaves(args, kwargs, []) if tensor.dim() == 2]
        if self._has_logits or rows[:1] != [self._num_logits]:
            return False
        self._has_logits = True
        return True
