"""One start to stop of a ``PrecisionDebugger``: captures of its models, and what is observed beside them.

Takes models and options; while it is open everything goes into a working dump of trainfer's own (readable after a kill);
at its end that dump is rewritten into msProbe's format and removed. Nothing here ends the program it watches: what
cannot be written is warned of.
"""
# pyright: standard
# (torch's hook types are partial)

import contextlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainfer.check.compare.source import DumpSide
from trainfer.check.dump.records import Role, TensorRecord
from trainfer.check.probe.capture import Capture, capture
from trainfer.check.probe.names import bare_name, named_modules
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError, DumpError
from trainfer.integrations.msprobe.naming import Naming
from trainfer.integrations.msprobe.observed import CallWatcher
from trainfer.integrations.msprobe.options import DebuggerOptions, Slice
from trainfer.integrations.msprobe.writer import StepWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A model to watch."""

    model: nn.Module
    prefix: str = ""
    """``0.`` where several models were given."""
    as_box: str = ""
    """Watch the module itself, under this name, and nothing inside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """Requests of a packed batch, in their order: {request id: tokens}."""

    tokens: Mapping[str, int]

    def slice_of(self, request_id: str) -> Slice | None:
        """The rows of one request, or None where it is not there."""
        begin = 0
        for request, count in self.tokens.items():
            if request == request_id:
                return Slice(dim=0, size=sum(self.tokens.values()), begin=begin, end=begin + count)
            begin += count
        return None


class Watch:
    """One model between start and stop."""

    def __init__(
        self,
        target: Target,
        folder: Path,
        options: DebuggerOptions,
        writer: StepWriter,
        *,
        rank: int,
        rounds: tuple[int, int] | None,
    ) -> None:
        self._folder, self._writer, self._rank = folder, writer, rank
        self._target, self._options = target, options
        modules = named_modules(target.model)
        watched = {"": modules[""]} if target.as_box else modules
        self._naming = _naming(target, watched)
        self._call_names: list[str] = []
        self._closed = False
        self._handles: list[RemovableHandle] = []
        self._round = -1
        self._rounds = rounds
        if rounds is not None:
            # Before the watcher's hooks: it is told whether this round counts.
            self._handles.append(target.model.register_forward_pre_hook(self._begin_round))
        keep = self._keep_weight if options.level != "L1" else None
        self._watcher = CallWatcher(watched, keep, stacks=options.extra_info)
        self._capture = _capture(target, folder, options, self._naming, rank=rank, rounds=rounds)
        self._capture.__enter__()
        if rounds is not None:
            self._handles.append(target.model.register_forward_hook(self._end_round, always_call=True))

    def close(self) -> None:
        """End the capture and write it in msProbe's format; warns where that fails."""
        for handle in self._handles:
            handle.remove()
        self._watcher.close()
        try:
            self._capture.__exit__(None, None, None)
            self._name_calls(len(self._watcher.calls))
            side = DumpSide(self._folder)
            records = list(side.tensors(self._rank, keep=self._has_a_place))
            calls = self._watcher.calls if self._options.level != "L1" else ()
            names = self._call_names if self._options.level != "L1" else ()
            self._writer.add(side, self._rank, records, self._naming, calls, names)
        except (CaptureError, DumpError) as error:
            warn(f"nothing was captured of {type(self._target.model).__name__}: {error}")
        except OSError as error:
            warn(
                f"msProbe's files could not be written ({error.strerror or error}); what was captured lies in "
                f"{self._folder}: `trainfer inspect` and `trainfer compare` read it"
            )
            return
        shutil.rmtree(self._folder, ignore_errors=True)

    def _has_a_place(self, record: TensorRecord) -> bool:
        """At level L1 nothing is known of modules, and so of their parameters."""
        return record.role is not Role.PARAMETER_GRADIENT or self._options.level != "L1"

    def _begin_round(self, _module: nn.Module, _args: object) -> None:
        self._round += 1
        first, last = self._rounds or (0, 0)
        self._watcher.is_open = first <= self._round <= last

    def _end_round(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._capture.step()

    def _keep_weight(self, local: str, tensor: Tensor) -> None:
        self._name_calls(len(self._watcher.calls))
        name = self._call_names[-1]
        if name:
            with contextlib.suppress(OSError):  # told at the end, when everything else is written
                self._writer.keep_parameter(name, local, tensor)

    def _name_calls(self, count: int) -> None:
        """Number the calls up to the latest; the model itself has no name."""
        for call in self._watcher.calls[len(self._call_names) : count]:
            base = self._naming.base(call.module)
            number = 0 if base is None else self._writer.ledger.number(base, "forward")
            self._call_names.append("" if base is None else f"{base}.forward.{number}")


class OwnCapture:
    """``format="trainfer"``: one capture, kept as it is."""

    def __init__(
        self, target: Target, folder: Path, options: DebuggerOptions, rounds: tuple[int, int] | None
    ) -> None:
        self._capture: Capture = capture(
            target.model,
            folder,
            side="train" if rounds is None else "rollout",
            level=options.level,
            task="tensor" if options.task == "tensor" else "statistics",
            backward="backward" in options.phases and rounds is None,
            steps=None if rounds is None else range(rounds[0], rounds[1] + 1),
        )
        self._capture.__enter__()
        self._handle = None if rounds is None else target.model.register_forward_hook(self._end_round)

    def close(self) -> None:
        """End the capture."""
        if self._handle is not None:
            self._handle.remove()
        try:
            self._capture.__exit__(None, None, None)
        except CaptureError as error:
            warn(str(error))

    def _end_round(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._capture.step()


def _naming(target: Target, watched: Mapping[str, nn.Module]) -> Naming:
    kinds = {name: type(module).__name__ for name, module in watched.items()}
    if target.as_box:
        return Naming(paths={"": target.as_box}, kinds=kinds)
    inner = {id(module): name for name, module in watched.items()}
    paths = {
        inner[id(module)]: f"{target.prefix}{raw}"
        for raw, module in target.model.named_modules()
        if id(module) in inner and bare_name(raw)
    }
    return Naming(paths=paths, kinds=kinds)


def _capture(
    target: Target,
    folder: Path,
    options: DebuggerOptions,
    naming: Naming,
    *,
    rank: int,
    rounds: tuple[int, int] | None,
) -> Capture:
    return capture(
        target.model,
        folder,
        side="train" if rounds is None else "rollout",
        level="L0" if options.level == "debug" else options.level,
        task="tensor" if options.needs_values else "statistics",
        backward="backward" in options.phases and options.task != "structure",
        modules=_listed(target, options, naming),
        steps=None if rounds is None else range(rounds[0], rounds[1] + 1),
        ranks=[rank],
    )


def _listed(target: Target, options: DebuggerOptions, naming: Naming) -> list[str] | None:
    """Modules that alone can match ``list``; None where that takes the whole records to know."""
    if target.as_box:
        return [""]
    parts = options.names
    decides = options.level == "L0" and parts and not options.scope
    if not decides or any("forward" in part or "backward" in part for part in parts):
        return None
    found = [
        name
        for name in naming.kinds
        if any(part in f"{naming.base(name)}." for part in parts) and naming.base(name) is not None
    ]
    return found or None


def with_request(options: DebuggerOptions, scheduled: Scheduled | None) -> DebuggerOptions | None:
    """The options for one packed batch; None where the wanted request is not in it."""
    if options.request_id is None or scheduled is None:
        return options
    cut = scheduled.slice_of(options.request_id)
    return None if cut is None else replace(options, slices=(*options.slices, cut))


def warn(message: str) -> None:
    """Tell; the program goes on."""
    warnings.warn(message, CaptureWarning, stacklevel=3)


def targets_of(model: object) -> Sequence[Target]:
    """The models behind ``start``'s argument.

    Raises:
        CaptureError: it is no module, and no list of modules.
    """
    if isinstance(model, nn.Module):
        return [Target(model=model)]
    models = list(model) if isinstance(model, list | tuple) else []
    if not models or not all(isinstance(member, nn.Module) for member in models):
        raise CaptureError(
            f"start: model is a {type(model).__name__}; give an nn.Module or a list of them, the module that is called"
        )
    return [Target(model=member, prefix=f"{place}.") for place, member in enumerate(models)]


def check_rounds(token_range: Sequence[int] | None) -> tuple[int, int] | None:
    """``token_range`` as first and last round.

    Raises:
        CaptureError: it is no such range.
    """
    if token_range is None:
        return None
    if len(token_range) != 2 or not 0 <= token_range[0] <= token_range[1]:
        raise CaptureError(
            f"token_range={list(token_range)!r}: give the first and the last forward call, both included; "
            "[0, 0] is the prefill alone"
        )
    return int(token_range[0]), int(token_range[1])


def check_number(name: str, value: object) -> int:
    """A number from 0 on.

    Raises:
        CaptureError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CaptureError(f"{name}={value!r}: give a number from 0 on")
    return value
