"""``trainfer.PrecisionDebugger``: msProbe's debugger by its interface, on trainfer's probe.

A recipe written for msProbe runs with only its import line changed, and writes msProbe's own format (or, with
``format="trainfer"``, ours). One debugger serves a process, as there. What it cannot do it says; it never
changes a value or a gradient, and a full disk ends no training.
"""
# pyright: standard
# (torch.distributed has partial types)

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from trainfer.errors import CaptureError, DumpError
from trainfer.integrations.msprobe.options import DebuggerOptions, load_options
from trainfer.integrations.msprobe.saving import ValueSaver
from trainfer.integrations.msprobe.service import DebuggerService, LiveConfig, StepFolders
from trainfer.integrations.msprobe.session import (
    OwnCapture,
    Scheduled,
    Target,
    Watch,
    check_number,
    check_rounds,
    targets_of,
    warn,
    with_request,
)
from trainfer.integrations.msprobe.writer import StepWriter


class PrecisionDebugger:
    """Captures what models compute between ``start`` and ``stop``; ``step`` goes on to the next step.

    Example:
        >>> debugger = trainfer.PrecisionDebugger(task="tensor", level="L0", dump_path="dumps", step=[0])
        >>> debugger.start(model=model)
        >>> loss = model(**batch).loss; loss.backward()
        >>> debugger.stop(); debugger.step()  # dumps/step0/rank0/dump.json
    """

    _instance: ClassVar["PrecisionDebugger | None"] = None

    def __new__(cls, *args: object, **kwargs: object) -> "PrecisionDebugger":
        """The process's debugger."""
        del args, kwargs
        return cls._instance if cls._instance is not None else super().__new__(cls)

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | Path | None = None,
        level: str | None = None,
        step: Sequence[int | str] | None = None,
        format: str | None = None,
    ) -> None:
        """Make the process's debugger; again without arguments, or with the same, it is the one there is.

        Args:
            config_path: msProbe's ``config.json``.
            task: ``statistics`` (default), ``tensor`` or ``structure``.
            dump_path: Folder of the dumps; ``./dump_path`` by default.
            level: ``L0`` modules, ``L1`` functions (default), ``mix`` both, ``debug`` single values.
            step: Steps to capture: numbers, ``"2"`` or ``"4-6"``; None for all.
            format: ``msprobe`` (default) or ``trainfer``.

        Raises:
            CaptureError: an option cannot be, or the process has a debugger with other ones.
            DumpError: ``config.json`` cannot be read.
        """
        arguments = (config_path, task, dump_path, level, step, format)
        if type(self)._instance is self:
            if any(given is not None for given in arguments) and arguments != self._arguments:
                raise CaptureError(
                    "this process has a PrecisionDebugger with other arguments, and one serves a process; use it, set "
                    "its service.config.dump_path, or call PrecisionDebugger.close() before making another"
                )
            return
        self._arguments = arguments
        self._options = self._load()
        self._signature = self._config_signature()
        self.config = LiveConfig(self._options.dump_path)
        self.service = DebuggerService(self.end_dump, self._options.dump_path)
        self._step = 0
        self._rank: int | None = None
        self._open: list[Watch] | list[OwnCapture] = []
        self._box: Watch | None = None
        self._writer: StepWriter | None = None
        self._saver: ValueSaver | None = None
        self._folders = StepFolders()
        self._model: object = None
        for note in self._options.notes:
            warn(note)
        type(self)._instance = self
        atexit.register(self._at_exit)

    @classmethod
    def start(
        cls,
        model: nn.Module | list[nn.Module] | tuple[nn.Module, ...] | None = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Capture from now on.

        Args:
            model: The module that is called, or several; needed once, later starts keep it.
            token_range: First and last forward call of the model since this start, both included: 0 is the prefill.
            rank_id: Number of the rank's folder where the process group's is not the right one.
            scheduled_tokens: Requests of a packed batch in their order, with their tokens; with the option
                ``request_id`` only that one's rows are kept, and nothing where it is not among them.

        Raises:
            CaptureError: an argument cannot be.
            DumpError: the dump's folder was used before.
        """
        self = cls._the_one()
        self._reload()
        options = with_request(
            self._options, Scheduled(tokens=scheduled_tokens) if scheduled_tokens else None
        )
        if options is None or options.enabled is False or options.level == "debug":
            return
        if self._open:
            warn("start() while a capture is open: it goes on; call stop() first to begin another")
            return
        self._model = self._model if model is None else model
        rounds = check_rounds(token_range)
        targets = targets_of(self._model)
        if rank_id is not None:
            self._rank = check_number("rank_id", rank_id)
        if self._wants_now():
            self._begin(targets, options, rounds)

    @classmethod
    def stop(cls) -> None:
        """End the capture and write it; the step goes on with the next ``start``."""
        cls._the_one()._close_windows()

    @classmethod
    def step(cls) -> None:
        """The program's step is over: what follows belongs to the next."""
        self = cls._the_one()
        self._close_windows()
        self.end_dump()
        self._step += 1

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Count on from this step.

        Raises:
            CaptureError: it is no number from 0 on.
        """
        self = cls._the_one()
        self.end_dump()
        self._step = check_number("set_init_step", step)

    @classmethod
    def save(cls, variable: object, name: str, save_backward: bool = True) -> None:  # noqa: FBT001, FBT002
        """Save one value (level debug): a tensor, a number, or a nest of them; and its gradients when they come.

        Raises:
            CaptureError: it holds something else.
        """
        self = cls._the_one()
        if self._options.level != "debug":
            warn(
                f"save({name!r}) does nothing at level {self._options.level}; make the debugger with level='debug'"
            )
            return
        if not self._wants_now() or self._options.enabled is False:
            return
        if self._saver is None:
            self._saver = ValueSaver(self._step_folder(), self._options)
        try:
            self._saver.save(variable, name, gradients=save_backward)
            self._saver.write()
        except OSError as error:
            warn(f"{name!r} could not be saved ({error.strerror or error}); the program goes on")

    @classmethod
    def register_custom_api(cls, module: object, api: str, api_prefix: str | None = None) -> None:
        """Has no meaning here, and says so: level L1 sees every function that torch dispatches."""
        del module, api_prefix
        warn(
            f"register_custom_api({api!r}) has no meaning here: level L1 sees every function that torch dispatches"
        )

    @classmethod
    def restore_custom_api(cls, module: object, api: str) -> None:
        """As ``register_custom_api``."""
        cls.register_custom_api(module, api)

    @classmethod
    def close(cls) -> None:
        """End the process's debugger: what is open is written, and another may be made."""
        self = cls._instance
        if self is not None:
            self._at_exit()
            atexit.unregister(self._at_exit)
            cls._instance = None

    def end_dump(self) -> None:
        """End the dump of this step; a later start of the same step begins it anew."""
        self._close_windows()
        if self._saver is not None:
            try:
                self._saver.write()
            except OSError as error:
                warn(f"debug.json could not be written ({error.strerror or error})")
        self._writer = self._saver = None

    def begin_box(self, module: nn.Module, name: str) -> None:
        """Capture one module as a black box until ``end_box``.

        Raises:
            CaptureError: it is no module, or another box is open.
        """
        if not isinstance(module, nn.Module) or not isinstance(name, str) or not name:
            raise CaptureError(
                f"module_dump: give an nn.Module and a name, not {type(module).__name__} and {name!r}"
            )
        if self._box is not None:
            raise CaptureError("module_dump: another one is open; call module_dump_end() first")
        if self._options.enabled is False or not self._wants_now():
            return
        target = Target(model=module, as_box=name)
        self._box = self._watch(target, self._options, None)

    def end_box(self) -> None:
        """End the black box and write it."""
        if self._box is not None:
            self._box.close()
            self._box = None
            self._write()

    @classmethod
    def _the_one(cls) -> "PrecisionDebugger":
        if cls._instance is None:
            raise CaptureError(
                "there is no PrecisionDebugger yet; make one before start, stop, step and save"
            )
        return cls._instance

    def _load(self) -> DebuggerOptions:
        config_path, task, dump_path, level, step, format_ = self._arguments
        options = load_options(
            config_path, task=task, level=level, dump_path=dump_path, step=step, format=format_
        )
        foreign = (
            options.names or options.scope or options.tensor_names or options.slices or options.request_id
        )
        if options.format == "trainfer" and (foreign or options.level == "debug"):
            raise CaptureError(
                "format='trainfer' takes task, level, rank and step; for list, scope, tensor_list, slice, request_id "
                "and level debug use msProbe's format, or trainfer.capture with modules="
            )
        return options

    def _config_signature(self) -> tuple[int, int] | None:
        path = self._arguments[0]
        try:
            found = None if path is None else Path(path).stat()
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size)

    def _reload(self) -> None:
        """``dump_enable``: a changed config.json takes effect at the next start."""
        signature = self._config_signature()
        if self._options.enabled is None or signature is None or signature == self._signature:
            return
        self._signature = signature
        try:
            options = self._load()
        except (CaptureError, DumpError) as error:
            warn(f"config.json was changed and cannot be used, the options before go on: {error}")
            return
        self._options = options
        if options.dump_path != self.config.dump_path:
            self.config.dump_path = self.service.config.dump_path = options.dump_path

    def _wants_now(self) -> bool:
        options = self._options
        rank = self._current_rank()
        return (not options.steps or self._step in options.steps) and (
            not options.ranks or rank in options.ranks
        )

    def _current_rank(self) -> int:
        if self._rank is not None:
            return self._rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _step_folder(self) -> Path:
        return self._folders.claim(self.service.config.dump_path, self._step, self._current_rank())

    def _begin(
        self, targets: Sequence[Target], options: DebuggerOptions, rounds: tuple[int, int] | None
    ) -> None:
        if options.format == "trainfer":
            path = self.service.config.dump_path
            self._open = [
                OwnCapture(target, self._folders.unused(path, self._step), options, rounds)
                for target in targets
            ]
            return
        self._open = [self._watch(target, options, rounds) for target in targets]

    def _watch(self, target: Target, options: DebuggerOptions, rounds: tuple[int, int] | None) -> Watch:
        if self._writer is None:
            self._writer = StepWriter(self._step_folder(), options)
        self._writer.use(options)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        folder = self._folders.work(self.service.config.dump_path, self._step, self._current_rank())
        return Watch(target, folder, options, self._writer, rank=rank, rounds=rounds)

    def _close_windows(self) -> None:
        windows, self._open = self._open, []
        for window in windows:
            window.close()
        if windows:
            self._write()

    def _write(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write()
        except OSError as error:
            warn(
                f"{self._writer.folder} could not be written ({error.strerror or error}); the program goes on"
            )
        self._folders.forget_work(self.service.config.dump_path)

    def _at_exit(self) -> None:
        self.end_box()
        self.end_dump()


def module_dump(module: nn.Module, dump_name: str) -> None:
    """Capture one module as a black box, under a name, until ``module_dump_end``.

    Raises:
        CaptureError: there is no debugger, or an argument cannot be.
    """
    PrecisionDebugger._the_one().begin_box(module, dump_name)


def module_dump_end() -> None:
    """End ``module_dump``.

    Raises:
        CaptureError: there is no debugger.
    """
    PrecisionDebugger._the_one().end_box()
