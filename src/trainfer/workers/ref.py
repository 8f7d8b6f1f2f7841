"""The ref: a frozen copy of the model that training started from, on one rank.

Takes sequences, gives their log-probs; it exists only where a KL term needs it.
"""

from collections.abc import Sequence

import torch
from torch import nn

from trainfer.exact.packed import CausalModel
from trainfer.train.update.logprob import ForwardLimit, score_sequences
from trainfer.types import SampledSequence, TokenScores


class RefWorker:
    """One rank's ref."""

    def __init__(self, model: nn.Module, *, log_prob_limit: ForwardLimit, device: torch.device | str) -> None:
        """Take over ``model``; nothing of it trains."""
        self._model = model.requires_grad_(requires_grad=False)
        self._limit = log_prob_limit
        self._device = device

    def ref_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses in the order given."""
        model: CausalModel = self._model
        return score_sequences(model, sequences, limit=self._limit, device=self._device)
