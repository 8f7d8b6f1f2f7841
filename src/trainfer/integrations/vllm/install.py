"""Captures a vLLM that nobody can call: in the worker processes of a server, a verl run, a script that is not edited.

``install(environment)`` reads ``TRAINFER_CAPTURE`` (JSON of ``settings.VllmCaptureSettings``) and covers the model
runners' ``execute_model`` as soon as vLLM imports them; the first real step then opens the capture, and the end of the
engine or of the process closes it. It

- does nothing, and imports no torch and no vLLM, where the variable is not set;
- may be called at any time and any number of times: before vLLM is imported, after, in every process. vLLM calls it by itself
  through its entry point ``vllm.general_plugins`` in each engine and worker process;
- never raises: settings that cannot be, a folder that is taken, an error inside a hook become a warning, the dump
  is marked incomplete, and vLLM goes on;
- needs no eager engine: captured steps alone leave compiled code and CUDA graphs (see ``session``).

Each worker writes one rank of the dump: its rank in the process group of its engine, plus ``TRAINFER_CAPTURE_REPLICA`` ×
workers of an engine. ``replicas`` in the settings is the number of engines that write into one folder, and
``TRAINFER_RUN_ID`` (or ``run_id``) must be the same for all of them.

With ``advance="weights"`` a step ends when weights were loaded and a forward follows: step 0 is everything
sampled with the first weights, however often they were loaded before. ``steps`` counts so. Sequences, request ids
(``<request>-<8 hex>`` in recent vLLM), sampled tokens and log-probs are written by the worker itself; set
``record`` to false to leave them out.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.util
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from trainfer.errors import TrainferError
from trainfer.integrations.vllm.settings import (
    REPLICA_VARIABLE,
    VARIABLE,
    VllmCaptureSettings,
    decode_settings,
)

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules that define a ``GPUModelRunner``; that of the CPU build inherits from the first."""
_MARK = "_trainfer_installed"


def install(environment: Mapping[str, str] | None = None) -> bool:
    """Cover the runners; True where a capture was asked for."""
    environment = os.environ if environment is None else environment
    text = environment.get(VARIABLE, "")
    if not text:
        return False
    try:
        settings = decode_settings(text)
        replica = int(environment.get(REPLICA_VARIABLE) or 0)
    except (TrainferError, ValueError) as error:
        warnings.warn(f"vLLM is not captured: {error}", UserWarning, stacklevel=2)
        return False
    for name in RUNNERS:
        module = sys.modules.get(name)
        if module is not None and "GPUModelRunner" in vars(module):
            _cover(module, settings, replica)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(lambda module: _cover(module, settings, replica)))
    return True


class _AfterImport(importlib.abc.MetaPathFinder):
    """Looks at the runners' modules once they are imported."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then
        self._looking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the others find, with a loader that tells us."""
        if fullname not in RUNNERS or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        loader, then = spec.loader, self._then
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _cover(module: ModuleType, settings: VllmCaptureSettings, replica: int) -> None:
    """Replace ``execute_model`` of the class by one that opens a capture at an object's first real step."""
    kind = module.GPUModelRunner
    method = kind.execute_model
    if hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        is_dummy = (args[1] if len(args) > 1 else kwargs.get("dummy_run", False)) is True
        if not is_dummy and not hasattr(runner, _MARK) and scheduler_output.total_num_scheduled_tokens:
            object.__setattr__(runner, _MARK, True)
            if _open(runner, settings, replica):
                return runner.execute_model(scheduler_output, *args, **kwargs)
        return method(runner, scheduler_output, *args, **kwargs)

    setattr(execute_model, _MARK, True)
    kind.execute_model = execute_model


def _open(runner: Any, settings: VllmCaptureSettings, replica: int) -> bool:
    from trainfer.integrations.vllm.session import WorkerCapture

    try:
        capture = WorkerCapture(runner, settings, replica=replica)
    except Exception as error:  # noqa: BLE001 - a run must not die of being watched
        warnings.warn(f"vLLM is not captured: {type(error).__name__}: {error}", UserWarning, stacklevel=2)
        return False
    # atexit is not run in children of multiprocessing; this is run in both
    multiprocessing.util.Finalize(None, _close, args=(capture,), exitpriority=100)
    return True


def _close(capture: Any) -> None:
    try:
        capture.close()
    except TrainferError as error:
        warnings.warn(f"the capture of vLLM ended badly: {error}", UserWarning, stacklevel=2)
