"""The ref: the frozen model that training started from, on one rank.

Takes sequences, gives their log-probs; it exists only where a KL term needs it. ``RefWorker`` has a model of its own,
``SharedRef`` the actor's, whose adapter it switches off.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from trainfer.exact.packed import CausalModel
from trainfer.exact.ulysses import SequenceShard
from trainfer.train.update.logprob import ForwardLimit, score_sequences
from trainfer.train.update.master import TrainableWeights
from trainfer.types import SampledSequence, TokenScores
from trainfer.workers.actor import HOST, ActorWorker


class Ref(Protocol):
    """Who scores as the frozen model."""

    def ref_logprobs(
        self,
        sequences: Sequence[SampledSequence],
        micro_batches: Sequence[Sequence[int]] | None = None,
    ) -> list[TokenScores]:
        """Score the responses in the order given; see ``score_sequences``."""
        ...


class RefWorker:
    """One rank's ref."""

    def __init__(
        self,
        weights: TrainableWeights,
        *,
        log_prob_limit: ForwardLimit,
        device: torch.device | str,
        shard: SequenceShard | None = None,
        offload: bool = False,
    ) -> None:
        """Take over ``weights``, none of which trains.

        Args:
            weights: The model.
            log_prob_limit: Of one forward.
            device: Where it computes.
            shard: This rank's place among those that share its sequences; None where it has them to itself.
            offload: True keeps the model in host memory between calls.
        """
        assert not weights.trainable(), "a ref is frozen"
        self._weights = weights
        self._limit = log_prob_limit
        self._device = torch.device(device)
        self._shard = shard
        self._offload = offload
        if offload:
            weights.move(HOST)

    def ref_logprobs(
        self,
        sequences: Sequence[SampledSequence],
        micro_batches: Sequence[Sequence[int]] | None = None,
    ) -> list[TokenScores]:
        """Score the responses in the order given; see ``score_sequences``."""
        model: CausalModel = self._weights.compute
        if self._offload:
            self._weights.move(self._device)
        scores = score_sequences(
            model,
            sequences,
            limit=self._limit,
            device=self._device,
            micro_batches=micro_batches,
            shard=self._shard,
        )
        self._weights.rest()
        if self._offload:
            self._weights.move(HOST)
        return scores


class SharedRef:
    """The actor's model without its adapter: the model that training started from, and no second one in memory."""

    def __init__(
        self,
        actor: ActorWorker,
        *,
        without_adapter: Callable[[nn.Module], AbstractContextManager[None]],
        log_prob_limit: ForwardLimit,
        device: torch.device | str,
        shard: SequenceShard | None = None,
    ) -> None:
        """Score with the model of ``actor`` inside ``without_adapter``; the rest is as in ``RefWorker``."""
        assert actor.adapter is not None, "what trains would be its own ref"
        self._actor = actor
        self._without_adapter = without_adapter
        self._limit = log_prob_limit
        self._device = torch.device(device)
        self._shard = shard

    def ref_logprobs(
        self,
        sequences: Sequence[SampledSequence],
        micro_batches: Sequence[Sequence[int]] | None = None,
    ) -> list[TokenScores]:
        """Score the responses in the order given; see ``score_sequences``."""
        model: CausalModel = self._actor.weights.compute
        with self._actor.at_work(), self._without_adapter(self._actor.weights.compute):
            return score_sequences(
                model,
                sequences,
                limit=self._limit,
                device=self._device,
                micro_batches=micro_batches,
                shard=self._shard,
            )
