"""An engine that answers from a script: tests of the training loop without a model.

Takes answers as a list (one per request, in order over all calls) or a function of the request; gives
completions as the real engines do. Weights are fingerprinted and dropped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainfer.errors import EngineError
from trainfer.exact.fingerprint import fingerprint
from trainfer.types import Completion, FinishReason, GenerationRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedAnswer:
    """One response, e.g. ``ScriptedAnswer(token_ids=(7, 1), logprobs=(-0.5, -0.1))``."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason = FinishReason.STOP


class ScriptedEngine:
    """Implements ``train.rollout.engine.Engine``.

    Args:
        answers: A list, used up from the front, or a function of the request.
        weights_version: Counts as for real engines.
    """

    def __init__(
        self,
        answers: Sequence[ScriptedAnswer] | Callable[[GenerationRequest], ScriptedAnswer],
        *,
        weights_version: int = 0,
    ) -> None:
        self._answer = answers if callable(answers) else _from_list(answers)
        self._weights_version = weights_version
        self._fingerprints: dict[str, str] = {}

    @property
    def weights_version(self) -> int:
        """Version given with the last weights."""
        return self._weights_version

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Answer each request.

        Raises:
            EngineError: The list is used up, or an answer's tokens and log-probs differ in number, or it is longer
                than the request allows.
        """
        return [self._complete(request, on_tokens) for request in requests]

    def _complete(self, request: GenerationRequest, on_tokens: Callable[[int], None] | None) -> Completion:
        answer = self._answer(request)
        if not answer.token_ids or len(answer.token_ids) != len(answer.logprobs):
            raise EngineError(
                f"request {request.request_id!r}: the scripted answer has {len(answer.token_ids)} tokens and "
                f"{len(answer.logprobs)} log-probs; give at least one token, and one log-prob each"
            )
        if len(answer.token_ids) > request.sampling.max_new_tokens:
            raise EngineError(
                f"request {request.request_id!r}: the scripted answer has {len(answer.token_ids)} tokens, and at most "
                f"{request.sampling.max_new_tokens} may be sampled; shorten it or raise data.max_response_length"
            )
        if on_tokens is not None:
            on_tokens(len(answer.token_ids))
        return Completion(
            request_id=request.request_id,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            weights_version=self._weights_version,
        )

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Keep the fingerprints only."""
        self._fingerprints = {name: fingerprint(tensor) for name, tensor in named_tensors}
        self._weights_version = version

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Of the last weights; empty before any came."""
        return dict(self._fingerprints)

    def close(self) -> None:
        """Nothing to free."""


def _from_list(answers: Sequence[ScriptedAnswer]) -> Callable[[GenerationRequest], ScriptedAnswer]:
    left = iter(answers)

    def take(request: GenerationRequest) -> ScriptedAnswer:
        answer = next(left, None)
        if answer is None:
            raise EngineError(
                f"request {request.request_id!r}: the script's {len(answers)} answers are used up; give more"
            )
        return answer

    return take
