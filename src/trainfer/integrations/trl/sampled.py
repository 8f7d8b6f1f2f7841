"""What ``generate`` sampled: whole sequences without padding, and the log-probs of the distribution they were drawn from.

TRL keeps no log-probs of what Transformers generates. They are read here from the scores behind temperature, filters and
penalties, a step at a time, so that one step's scores are held and no more. Scores are handed on as they came.

Axes: B sequences of a call, T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The sequences of one call of ``generate``."""

    sequences: list[list[int]]
    """Prompt and response, without padding; the response ends with its first end token."""
    prompt_lengths: list[int]
    logprobs: list[list[float]]
    """One for each response token."""


class ScoreReader:
    """The last of the logits processors: takes the log-probs of the sampled tokens, changes nothing."""

    def __init__(self) -> None:
        self._pending_BV: Tensor | None = None
        self._taken: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called before each token is drawn; ``input_ids`` ends with the one drawn before."""
        self._take(input_ids)
        self._pending_BV = scores.detach().float().log_softmax(-1)
        return scores

    def logprobs_BT(self, drawn_BT: Tensor) -> Tensor:
        """Log-probs of all tokens that were drawn; ``drawn_BT`` is what ``generate`` returned."""
        self._take(drawn_BT)
        return torch.stack(self._taken, dim=1)

    def _take(self, ids_BT: Tensor) -> None:
        if self._pending_BV is not None:
            self._taken.append(self._pending_BV.gather(-1, ids_BT[:, -1:])[:, 0])
            self._pending_BV = None


@contextmanager
def scores_read_by(reader: ScoreReader, model: nn.Module) -> Iterator[None]:
    """Put a reader behind all other processors of ``generate``, while the context lasts."""
    generating: Any = next(module for module in model.modules() if isinstance(module, GenerationMixin))
    original = generating._get_logits_processor

    def with_reader(*args: object, **kwargs: object) -> object:
        processors = original(*args, **kwargs)
        processors.append(reader)
        return processors

    vars(generating)["_get_logits_processor"] = with_reader
    try:
        yield
    finally:
        del vars(generating)["_get_logits_processor"]


def sampled(
    prompts_BT: Tensor,
    mask_BT: Tensor | None,
    drawn_BT: Tensor,
    reader: ScoreReader,
    end_tokens: Sequence[int],
) -> Sampled:
    """Take the padding off a call of ``generate``.

    Args:
        prompts_BT: What it was given.
        mask_BT: Its attention mask; None: no padding.
        drawn_BT: What it returned: prompts as given, then the responses.
        reader: Behind its processors.
        end_tokens: A response ends with the first of these.
    """
    width = prompts_BT.shape[1]
    logprobs = reader.logprobs_BT(drawn_BT).tolist()
    prompts = [
        ids if mask_BT is None else [token for token, real in zip(ids, kept, strict=True) if real]
        for ids, kept in zip(
            prompts_BT.tolist(), (prompts_BT if mask_BT is None else mask_BT).tolist(), strict=True
        )
    ]
    responses = [_up_to_end(ids, set(end_tokens)) for ids in drawn_BT[:, width:].tolist()]
    return Sampled(
        sequences=[[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)],
        prompt_lengths=[len(prompt) for prompt in prompts],
        logprobs=[row[: len(response)] for row, response in zip(logprobs, responses, strict=True)],
    )


def _up_to_end(tokens: list[int], ends: set[int]) -> list[int]:
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]
