"""Checks requests before anything is computed; plain integers and floats."""

from collections.abc import Sequence

from trainfer.errors import EngineError
from trainfer.types import GenerationRequest, SamplingParams


def check_requests(
    requests: Sequence[GenerationRequest], *, vocab_size: int, max_positions: int, cache_tokens: int | None
) -> None:
    """Refuse what cannot be sampled.

    Args:
        requests: All requests of a call.
        vocab_size: Token ids are below it.
        max_positions: Longest sequence of the model.
        cache_tokens: Tokens that the cache can hold for one sequence; None is no limit.

    Raises:
        EngineError: Names the request, the value, the rule and the remedy.
    """
    for request in requests:
        name, prompt, sampling = request.request_id, request.prompt_ids, request.sampling
        if not prompt:
            raise EngineError(f"request {name!r} has an empty prompt; a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise EngineError(
                f"request {name!r}: prompt token {bad} lies outside the model's vocabulary of {vocab_size}; "
                "is the tokenizer the model's own?"
            )
        total = len(prompt) + sampling.max_new_tokens
        if total > max_positions:
            raise EngineError(
                f"request {name!r}: {len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones make {total}, "
                f"the model has {max_positions} positions; shorten data.max_prompt_length or data.max_response_length"
            )
        if cache_tokens is not None and total > cache_tokens:
            raise EngineError(
                f"request {name!r}: needs {total} tokens of cache, there are {cache_tokens}; raise the engine's cache"
            )
        _check_sampling(name, sampling)


def _check_sampling(name: str, sampling: SamplingParams) -> None:
    rules = (
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        (
            "temperature",
            sampling.temperature,
            0 <= sampling.temperature < float("inf"),
            "finite and at least 0",
        ),
        ("top_k", sampling.top_k, sampling.top_k == -1 or sampling.top_k >= 1, "-1 (off) or at least 1"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "between 0 and 1"),
    )
    for field, value, holds, rule in rules:
        if not holds:
            raise EngineError(f"request {name!r}: {field} is {value}; it must be {rule}")
