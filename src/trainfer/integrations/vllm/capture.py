"""``with trainfer.capture(llm, path, side="rollout")``: what a ``vllm.LLM`` computes, from the process that calls it.

Takes an ``LLM`` (or its ``LLMEngine``); the work is done in vLLM's workers (``session``), here are only the calls to them.
Sequences and their log-probs are recorded by the workers as requests end.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from trainfer import errors
from trainfer.check.dump.folder import new_run_id, resolve_run_folder
from trainfer.check.probe.sequences import check_sequences
from trainfer.errors import CaptureError
from trainfer.integrations.vllm import extension
from trainfer.integrations.vllm.answers import RAW, Answer
from trainfer.integrations.vllm.settings import VllmCaptureSettings

EXTENSION = "trainfer.integrations.vllm.extension.TrainferExtension"


class VllmCapture:
    """An open capture of a vLLM engine; see ``trainfer.capture``."""

    def __init__(self, llm: Any, settings: VllmCaptureSettings) -> None:
        """``llm``: a ``vllm.LLM`` or anything with its ``collective_rpc``."""
        run_id = settings.run_id or new_run_id()
        self.folder = resolve_run_folder(settings.path, run_id).absolute()
        """Where the dump lies."""
        self._llm = llm
        self._settings = msgspec.structs.replace(settings, run_id=run_id, path=str(self.folder))
        self._by_name = _reaches_by_name(llm)

    def __enter__(self) -> "VllmCapture":
        """Hook the model in every worker.

        Raises:
            CaptureError: a setting cannot be.
            DumpError: the folder was used before.
        """
        self._call("open", self._settings.encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the dump.

        Raises:
            CaptureError: nothing was captured because the engine ran no step; not over the program's own error.
        """
        try:
            self._call("close")
        except errors.TrainferError:
            if kind is None:
                raise

    def step(self, *, weights_version: int | None = None) -> None:
        """Go on to the program's next step; ``weights_version`` where the weights changed with it."""
        self._call("step", weights_version)

    def describe_run(self, config: Mapping[str, object]) -> None:
        """Put the program's effective configuration into the manifest; before the capture begins."""
        self._settings = msgspec.structs.replace(self._settings, config={**self._settings.config, **config})

    def record_logprobs(
        self,
        *,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        logprobs: Sequence[Sequence[float]],
        sampling: Mapping[str, float | int] | None = None,
        request_ids: Sequence[str] | None = None,
        pass_name: str | None = None,
    ) -> None:
        """Record sequences of the caller's; as ``check.probe.capture.Capture.record_logprobs``.

        Raises:
            CaptureError: lengths that do not fit together, or an unknown sampling key.
        """
        check_sequences(
            sequences, prompt_lengths, logprobs, sampling or {}, request_ids,
            first=0, weights_version=0, step=0, pass_name=pass_name or "decode",
        )  # fmt: skip
        answers = [
            Answer(
                request="" if request_ids is None else request_ids[place],
                prompt=tuple(tokens[:length]),
                sampling={**RAW, **(sampling or {})},
                tokens=list(tokens[length:]),
                logprobs=list(values),
            )
            for place, (tokens, length, values) in enumerate(
                zip(sequences, prompt_lengths, logprobs, strict=True)
            )
        ]
        self._call("record", msgspec.json.encode(answers).decode(), pass_name)

    def _call(self, what: str, *arguments: object) -> None:
        method: Any = f"trainfer_capture_{what}" if self._by_name else vars(extension)[f"{what}_capture"]
        for kind, words in self._llm.collective_rpc(method, args=arguments):
            if kind:
                raise vars(errors).get(kind, CaptureError)(words)


def _reaches_by_name(llm: Any) -> bool:
    """True where the workers have our methods; False where functions can be handed to them.

    Raises:
        CaptureError: neither.
    """
    engine = vars(llm).get("llm_engine", llm)
    name = engine.vllm_config.parallel_config.worker_extension_cls
    if name and _has_methods(name):
        return True
    if "engine_core" in vars(engine.engine_core):
        return False
    raise CaptureError(
        "this vLLM engine runs in a process of its own, where nothing can be hooked from here: start it with "
        f"LLM(..., worker_extension_cls={EXTENSION!r}), or with VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment"
    )


def _has_methods(name: str) -> bool:
    import pkgutil

    module, _, attribute = name.rpartition(".")
    try:
        return issubclass(pkgutil.resolve_name(f"{module}:{attribute}"), extension.TrainferExtension)
    except (ImportError, AttributeError, ValueError, TypeError):
        return False
