"""What a vLLM engine sampled, request by request, with log-probs: the runner's outputs -> recorded sequences.

Takes the outputs of the steps that a capture saw; gives sequences once their request has ended. What vLLM
reports as log-probs is said with them: of the sampled distribution, or of the raw one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainfer.integrations.vllm.schedule import Scheduled

RAW: dict[str, float | int] = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request's tokens."""

    request: str
    prompt: tuple[int, ...]
    sampling: dict[str, float | int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    @property
    def is_whole(self) -> bool:
        """True where every token has its log-prob."""
        return len(self.tokens) == len(self.logprobs)


class Answers:
    """Requests that began inside the capture."""

    def __init__(self, mode: str) -> None:
        """``mode``: vLLM's ``logprobs_mode``."""
        self._is_raw = mode.startswith("raw")
        self._are_logprobs = mode.endswith("logprobs")
        self._running: dict[str, Answer] = {}

    def begin(self, step: Scheduled) -> list[Answer]:
        """A step is scheduled; the answers that ended with the one before."""
        ended = [self._running.pop(request) for request in step.finished if request in self._running]
        for request, params in step.sampling.items():
            if params is not None:
                self._running[request] = Answer(
                    request=request,
                    prompt=step.prompts[request],
                    sampling=dict(RAW) if self._is_raw else _applied(params),
                )
        return ended

    def take(self, output: Any) -> None:
        """What a step sampled; a request whose prompt is not yet computed to its end has no token in it."""
        logprobs = output.logprobs
        starts = None if logprobs is None else logprobs._asdict().get("cu_num_generated_tokens")
        for place, (request, tokens) in enumerate(
            zip(output.req_ids, output.sampled_token_ids, strict=False)
        ):
            answer = self._running.get(request)
            if answer is None or not len(tokens):
                continue
            answer.tokens.extend(int(token) for token in tokens)
            if logprobs is not None and self._are_logprobs:
                row = place if starts is None else starts[place]
                answer.logprobs.extend(float(logprobs.logprobs[row + i][0]) for i in range(len(tokens)))

    def rest(self) -> list[Answer]:
        """All that is not ended."""
        rest = list(self._running.values())
        self._running.clear()
        return rest


def _applied(params: Any) -> dict[str, float | int]:
    values: Mapping[str, Any] = {name: getattr(params, name) for name in RAW}
    top_k = int(values["top_k"])
    return {
        "temperature": float(values["temperature"]),
        "top_k": top_k if top_k > 0 else -1,
        "top_p": float(values["top_p"]),
        "min_p": float(values["min_p"]),
    }
