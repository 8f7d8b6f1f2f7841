"""A captured step on one rank: what the engine and the actor compute, into one dump a side.

Takes a ``CaptureOrder`` and a module (or a vLLM engine); opens the capture around the calls that the worker makes anyway. It changes
nothing of what is computed, and whatever goes wrong with it ends the capture, not the run: a line says so, and the
comparison finds the dump missing or incomplete.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from trainfer.check.probe.capture import Capture
from trainfer.errors import TrainferError
from trainfer.integrations.capture import capture
from trainfer.integrations.vllm.capture import VllmCapture
from trainfer.types import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureOrder:
    """What every rank captures until it is told to stop."""

    rollout_folder: Path
    train_folder: Path
    train_pass: str
    """The actor's pass that is captured: ``update`` or ``old_log_prob``."""
    level: str
    task: str
    modules: tuple[str, ...] | None
    """Names or patterns; None for all."""
    prompts_only: bool
    """No decode, and an update that sees prompts alone and steps no optimizer."""
    mini_batches_per_epoch: int
    max_bytes: int | None
    """Of one side on one rank."""
    config: Mapping[str, object]
    """The run's, for the manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One sequence and the log-probs of its response."""

    token_ids: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[float, ...]
    sampling: SamplingParams
    """As applied to ``logprobs``."""


class StepCapture:
    """One side of a captured step on one rank."""

    def __init__(
        self, model: object, order: CaptureOrder, *, side: str, pass_name: str | None, weights_version: int
    ) -> None:
        self.records = True
        """False: ``record`` does nothing."""
        self._side = side
        self._open: Capture | VllmCapture | None = None
        try:
            opened = capture(
                model,
                order.rollout_folder if side == "rollout" else order.train_folder,
                side=side,
                pass_name=pass_name,
                weights_version=weights_version,
                level=order.level,
                task=order.task,
                modules=order.modules,
                prompts_only=order.prompts_only,
                max_bytes=order.max_bytes,
            )
            opened.describe_run(order.config)
            self._open = opened.__enter__()
        except TrainferError as error:
            self._tell(error)

    def record(self, sequences: Sequence[Recorded]) -> None:
        """Put sequences and log-probs beside what was captured."""
        by_sampling: dict[SamplingParams, list[Recorded]] = {}
        for sequence in sequences:
            by_sampling.setdefault(sequence.sampling, []).append(sequence)
        for sampling, members in by_sampling.items():
            if self._open is None or not self.records:
                return
            try:
                self._open.record_logprobs(
                    sequences=[member.token_ids for member in members],
                    prompt_lengths=[member.prompt_length for member in members],
                    logprobs=[member.logprobs for member in members],
                    sampling={
                        "temperature": sampling.temperature,
                        "top_k": sampling.top_k,
                        "top_p": sampling.top_p,
                        "min_p": sampling.min_p,
                    },
                )
            except TrainferError as error:
                self._tell(error)

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End the capture; a second time does nothing."""
        opened, self._open = self._open, None
        if opened is not None:
            try:
                opened.__exit__(kind, error, trace)
            except TrainferError as problem:
                self._tell(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kind, error, trace)

    def _tell(self, error: TrainferError) -> None:
        logger.warning("The %s side is not captured, training goes on: %s", self._side, error)


@contextmanager
def watched(
    model: object | None,
    order: CaptureOrder | None,
    *,
    side: str,
    pass_name: str | None,
    version: int,
    records: bool = True,
) -> Iterator[StepCapture | None]:
    """The capture that the order asks for, around one pass; None where nothing is to be captured.

    ``records`` is False on a rank whose sequences another rank of the same rows records.
    """
    if model is None or order is None:
        yield None
        return
    with StepCapture(model, order, side=side, pass_name=pass_name, weights_version=version) as opened:
        opened.records = records
        yield opened


def prompts_recorded(prompts: Sequence[tuple[int, ...]]) -> list[Recorded]:
    """Prompts without response: they tell the report what the rows say."""
    return [
        Recorded(
            token_ids=prompt,
            prompt_length=len(prompt),
            logprobs=(),
            sampling=SamplingParams(max_new_tokens=1),
        )
        for prompt in dict.fromkeys(prompts)
    ]
