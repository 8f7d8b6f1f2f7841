"""The actor: the model that trains, on one rank.

Takes sequences; scores them, updates the model, hands out its weights, saves and restores itself. It
neither samples nor decides which sequences it gets: see ``local_group.py``.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainfer.exact.packed import CausalModel
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.checkpoint import load_training_state, save_training_state
from trainfer.train.update.logprob import ForwardLimit, score_sequences
from trainfer.train.update.master import MasterWeights
from trainfer.train.update.trainer import Trainer, TrainerSettings, UpdateResult
from trainfer.types import SampledSequence, TokenScores


class ActorWorker:
    """One rank's share of the model that trains."""

    def __init__(
        self,
        model: nn.Module,
        settings: TrainerSettings,
        *,
        compute_dtype: torch.dtype,
        log_prob_limit: ForwardLimit,
        device: torch.device | str,
    ) -> None:
        """Take over ``model``, whose parameters are in the master format."""
        self.weights = MasterWeights(model, compute_dtype=compute_dtype)
        self.trainer = Trainer(self.weights, settings, device=device)
        self._log_prob_limit = log_prob_limit
        self._device = device

    @property
    def weights_version(self) -> int:
        """Optimizer steps that changed the weights, since the start of the run."""
        return self.trainer.optimizer_steps

    @property
    def updates(self) -> int:
        """Updates since the start of the run."""
        return self.trainer.updates

    @property
    def kl_coef(self) -> float:
        """Weight of the loss's KL term."""
        return self.trainer.settings.loss.kl_loss_coef

    @property
    def model(self) -> nn.Module:
        """The module that computes: what a rollout engine must equal."""
        return self.weights.compute

    def old_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses, without gradient, in the order given."""
        model: CausalModel = self.weights.compute
        return score_sequences(model, sequences, limit=self._log_prob_limit, device=self._device)

    def update(self, mini_batches: Sequence[MiniBatch]) -> UpdateResult:
        """One optimizer step per mini-batch."""
        return self.trainer.update(mini_batches)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, random generators and counters below ``folder``."""
        counters = {"updates": self.trainer.updates, "optimizer_steps": self.trainer.optimizer_steps}
        save_training_state(folder, self.weights.master, self.trainer.optimizer, counters)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""
        state = load_training_state(folder, self.weights.master, self.trainer.optimizer)
        self.trainer.updates = int(state.counters["updates"])
        self.trainer.optimizer_steps = int(state.counters["optimizer_steps"])
        self.weights.refresh()
