"""Methods on vLLM's worker that open and close a capture; called by name through ``collective_rpc``.

``LLM(…, worker_extension_cls="trainfer.integrations.vllm.extension.TrainferExtension")`` adds them, which an engine in
its own process needs; where vLLM runs in the caller's process ``trainfer.capture`` calls the functions below instead.
"""

import os
import weakref
from typing import Any

import msgspec

from trainfer.errors import CaptureError, TrainferError
from trainfer.integrations.vllm.answers import Answer
from trainfer.integrations.vllm.session import WorkerCapture
from trainfer.integrations.vllm.settings import REPLICA_VARIABLE, decode_settings

_OPEN: "weakref.WeakKeyDictionary[Any, WorkerCapture]" = weakref.WeakKeyDictionary()
"""Model runner -> its open capture."""

Reply = tuple[str, str]
"""("", "") or the name and the words of an error: exceptions of ours may not survive the way between processes."""


def open_capture(worker: Any, settings: str) -> Reply:
    """Begin; ``settings`` is the JSON of ``VllmCaptureSettings``."""
    runner = worker.model_runner
    if runner in _OPEN:
        return ("CaptureError", "this vLLM engine is being captured already; end that capture first")
    try:
        replica = int(os.environ.get(REPLICA_VARIABLE) or 0)
        _OPEN[runner] = WorkerCapture(runner, decode_settings(settings), replica=replica)
    except (TrainferError, ValueError) as error:
        return (type(error).__name__, str(error))
    return ("", "")


def close_capture(worker: Any) -> Reply:
    """End."""
    opened = _OPEN.pop(worker.model_runner, None)
    try:
        if opened is not None:
            opened.close()
    except TrainferError as error:
        return (type(error).__name__, str(error))
    return ("", "")


def step_capture(worker: Any, weights_version: int | None = None) -> Reply:
    """Go on to the program's next step."""
    opened = _OPEN.get(worker.model_runner)
    if opened is not None:
        opened.next_step(weights_version)
    return ("", "")


def record_capture(worker: Any, answers: str, pass_name: str | None = None) -> Reply:
    """Record sequences; ``answers`` is JSON of a list of ``Answer``. Of several shards the first one writes."""
    opened = _OPEN.get(worker.model_runner)
    try:
        if opened is not None and opened.is_first_shard:
            opened.record(msgspec.json.decode(answers, type=list[Answer]), pass_name)
    except CaptureError as error:
        return (type(error).__name__, str(error))
    return ("", "")


class TrainferExtension:
    """vLLM makes this class a base of its worker."""

    def trainfer_capture_open(self, settings: str) -> Reply:
        """See ``open_capture``."""
        return open_capture(self, settings)

    def trainfer_capture_close(self) -> Reply:
        """See ``close_capture``."""
        return close_capture(self)

    def trainfer_capture_step(self, weights_version: int | None = None) -> Reply:
        """See ``step_capture``."""
        return step_capture(self, weights_version)

    def trainfer_capture_record(self, answers: str, pass_name: str | None = None) -> Reply:
        """See ``record_capture``."""
        return record_capture(self, answers, pass_name)
