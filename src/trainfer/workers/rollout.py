"""The rollout: an engine that samples, on one rank.

Takes requests, gives completions; takes weights and says what it computes with. Everything else is the
engine's own (``train.rollout.engine``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from trainfer.train.rollout.engine import Engine, HasLlm, HasModule
from trainfer.types import Completion, GenerationRequest
from trainfer.workers.watching import CaptureOrder, Recorded, StepCapture, prompts_recorded, watched

NOT_HERE = "the engine computes with no module of this process"


class RolloutWorker:
    """One engine."""

    def __init__(self, engine: Engine) -> None:
        """Take over ``engine``."""
        self.engine = engine
        self._order: CaptureOrder | None = None

    @property
    def module(self) -> object | None:
        """What can be watched from this process: the module that the engine computes with, or its vLLM."""
        if isinstance(self.engine, HasModule):
            return self.engine.module
        return self.engine.llm if isinstance(self.engine, HasLlm) else None

    def watch(self, order: CaptureOrder | None) -> None:
        """Capture what is sampled from now on; None ends it."""
        self._order = order

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Sample, in the order of the requests."""
        order = self._order if requests else None
        version = self.engine.weights_version
        with watched(self.module, order, side="rollout", pass_name=None, version=version) as watching:
            completions = self.engine.generate(requests, on_tokens=on_tokens)
            # vLLM's workers record by themselves, under vLLM's request ids
            if watching is not None and order is not None and not isinstance(self.engine, HasLlm):
                _record(watching, order, requests, completions)
        return completions

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights."""
        self.engine.load_weights(named_tensors, version=version)

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Of every tensor that the engine computes with."""
        return self.engine.weight_fingerprints()

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()


def _record(
    watching: StepCapture,
    order: CaptureOrder,
    requests: Sequence[GenerationRequest],
    completions: Sequence[Completion],
) -> None:
    if order.prompts_only:
        watching.record(prompts_recorded([request.prompt_ids for request in requests]))
        return
    watching.record(
        [
            Recorded(
                token_ids=request.prompt_ids + completion.token_ids,
                prompt_length=len(request.prompt_ids),
                logprobs=completion.logprobs,
                sampling=request.sampling,
            )
            for request, completion in zip(requests, completions, strict=True)
        ]
    )
