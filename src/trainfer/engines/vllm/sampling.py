"""Requests -> vLLM's sampling parameters; its outputs -> completions. Token ids pass through unchanged.

Imports vLLM. Temperature, top-k, top-p and min-p have the same names and meanings there, except where
``check_sampling`` refuses.
"""

from collections.abc import Sequence

from vllm.outputs import RequestOutput  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import SamplingParams as VllmSamplingParams  # pyright: ignore[reportMissingImports]

from trainfer.errors import EngineError
from trainfer.types import Completion, FinishReason, GenerationRequest

LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this without an error."""
_SEED_MASK = (1 << 63) - 1


def check_sampling(requests: Sequence[GenerationRequest]) -> None:
    """Refuse what vLLM samples differently from what ``types.SamplingParams`` says.

    Raises:
        EngineError: A temperature that vLLM would change, or min-p with top-p, which it applies in the other order.
    """
    for request in requests:
        sampling = request.sampling
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise EngineError(
                f"request {request.request_id!r}: temperature is {sampling.temperature}; vLLM samples at "
                f"{LOWEST_TEMPERATURE} instead of anything below; use 0 (greedy) or at least {LOWEST_TEMPERATURE}"
            )
        if sampling.temperature > 0 and sampling.min_p > 0 and sampling.top_p < 1:
            raise EngineError(
                f"request {request.request_id!r}: min_p is {sampling.min_p} and top_p {sampling.top_p}; vLLM applies min_p "
                "first, all other engines and the trainer top_p, which keeps other tokens; use one of the two"
            )


def vllm_params(request: GenerationRequest) -> VllmSamplingParams:
    """Sampled token's log-prob only; ended by the request's stop tokens, never by those of the model folder."""
    sampling = request.sampling
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=request.seed & _SEED_MASK,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(request: GenerationRequest, output: RequestOutput, *, weights_version: int) -> Completion:
    """What vLLM sampled, checked.

    Raises:
        EngineError: The output is not a whole response: another prompt, aborted, or tokens without log-probs.
    """
    name, answer = request.request_id, output.outputs[0]
    if tuple(output.prompt_token_ids or ()) != request.prompt_ids:
        raise EngineError(f"request {name!r}: vLLM answered another prompt than it was given")
    token_ids = tuple(answer.token_ids)
    rows = [row for row in answer.logprobs or () if row is not None]
    if len(rows) != len(token_ids):
        raise EngineError(f"request {name!r}: vLLM gave {len(token_ids)} tokens without a log-prob for each")
    return Completion(
        request_id=name,
        token_ids=token_ids,
        logprobs=tuple(row[token].logprob for row, token in zip(rows, token_ids, strict=True)),
        finish_reason=_finish_reason(name, answer.finish_reason, token_ids, request.sampling.stop_token_ids),
        weights_version=weights_version,
    )


def _finish_reason(
    name: str, reason: str | None, token_ids: tuple[int, ...], stop_token_ids: tuple[int, ...]
) -> FinishReason:
    if reason == "stop" and token_ids and token_ids[-1] in stop_token_ids:
        return FinishReason.STOP
    if reason == "length" and token_ids:
        return FinishReason.LENGTH
    raise EngineError(
        f"request {name!r}: vLLM ended it with finish reason {reason!r} after {len(token_ids)} tokens; a response ends with "
        "a stop token or at its length"
    )
