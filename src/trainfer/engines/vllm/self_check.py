"""Does this vLLM report log-probs of the distribution that it samples? Asked of the running engine at start.

Takes the engine; raises if not. Three one-token requests of one prompt: at temperature 1, at temperature ¼,
and with top-k 1. Of the sampled distribution, the gap between the two likeliest tokens is four times as wide
at temperature ¼, and a token that is the only one left has log-prob 0.
"""

from collections.abc import Mapping
from typing import Any

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

from trainfer.errors import EngineError

MODE = "processed_logprobs"
_PROMPT_TOKENS = 8
"""Several, since the embedding of a padding token may be zero, and all logits with it."""
_TEMPERATURE = 0.25
_SMALLEST_GAP = 0.01
"""Nats; below it (a model that knows nothing) no answer tells the modes apart, and vLLM's own word is taken."""
_ROUNDING = 1e-3


def check_logprobs(llm: LLM) -> None:
    """Compare three answers.

    Raises:
        EngineError: Log-probs are not those of the sampled distribution.
    """
    config = llm.llm_engine.model_config
    tokens = min(_PROMPT_TOKENS, config.get_vocab_size(), config.max_model_len - 1)
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": _TEMPERATURE}, {"top_k": 1})
    plain, cold, filtered = (
        _first_token(
            llm, tokens, SamplingParams(max_tokens=1, logprobs=2, detokenize=False, seed=0, **changes)
        )
        for changes in ways
    )
    first, second = sorted(plain, key=lambda token: plain[token], reverse=True)[:2]
    gap = plain[first] - plain[second]
    if gap < _SMALLEST_GAP or not {first, second} <= set(cold):
        if config.logprobs_mode != MODE:
            raise EngineError(_message("this model", f"logprobs_mode={MODE}", config.logprobs_mode))
        return
    if abs(max(filtered.values())) > _ROUNDING:
        raise EngineError(_message("top-k 1", "0", f"{max(filtered.values()):.4f}"))
    cold_gap = cold[first] - cold[second]
    if abs(cold_gap - gap / _TEMPERATURE) > abs(cold_gap - gap):
        expected = f"a gap of {gap / _TEMPERATURE:.4f} between the two likeliest tokens"
        raise EngineError(_message(f"temperature {_TEMPERATURE}", expected, f"{cold_gap:.4f}"))


def _first_token(llm: LLM, prompt_tokens: int, params: SamplingParams) -> Mapping[int, float]:
    prompt: Any = {"prompt_token_ids": list(range(prompt_tokens))}
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    first = output.logprobs[0] if output.logprobs else None
    assert first is not None, "they were asked for"
    return {token: entry.logprob for token, entry in first.items()}


def _message(case: str, expected: str, found: str) -> str:
    return (
        f"vLLM's log-probs are not those of the distribution it samples: with {case} {expected} was expected, it gave {found}. "
        f"Ratios and agreement would be computed from the wrong numbers. trainfer starts vLLM with logprobs_mode={MODE}; a "
        "plugin or a version of vLLM that ignores it cannot be used"
    )
