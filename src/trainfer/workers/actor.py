"""The actor: the model that trains, on one rank.

Takes sequences; scores them, updates the model, hands out its weights, saves and restores itself. It
neither samples nor decides which sequences it gets: see ``local_group.py``.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trainfer.exact.packed import CausalModel
from trainfer.exact.ulysses import SequenceShard
from trainfer.train.update.adapter import AdapterLayout
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.checkpoint import StagedState, load_training_state, stage_training_state
from trainfer.train.update.checkpoint_adapter import StoredAdapter
from trainfer.train.update.checkpoint_background import BackgroundWrite
from trainfer.train.update.logprob import ForwardLimit, score_sequences
from trainfer.train.update.master import TrainableWeights
from trainfer.train.update.prompts import forward_prompts, prompts_of
from trainfer.train.update.sharded import move_optimizer_state
from trainfer.train.update.trainer import Trainer, TrainerSettings, UpdateResult
from trainfer.types import SampledSequence, SamplingParams, TokenScores
from trainfer.workers.watching import CaptureOrder, Recorded, StepCapture, prompts_recorded, watched
from trainfer.workers.weights import base_fingerprints

HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """What waits in host memory between calls."""

    parameters: bool = False
    optimizer: bool = False


class ActorWorker:
    """One rank's share of the model that trains."""

    def __init__(
        self,
        weights: TrainableWeights,
        settings: TrainerSettings,
        *,
        log_prob_limit: ForwardLimit,
        device: torch.device | str,
        shard: SequenceShard | None = None,
        offload: Offload | None = None,
        adapter: AdapterLayout | None = None,
    ) -> None:
        """Take over ``weights``.

        Args:
            weights: The model.
            settings: Of the update.
            log_prob_limit: Of one forward of the old-log-prob pass.
            device: Where it computes.
            shard: This rank's place among those that share its sequences; None where it has them to itself.
            offload: What waits in host memory between calls. None: nothing.
            adapter: Where the model's adapter is, if an adapter is what trains; checkpoints then hold that alone.
        """
        self.weights = weights
        self.adapter = adapter
        self.trainer = Trainer(weights, settings, device=device, shard=shard)
        self._log_prob_limit = log_prob_limit
        self._device = torch.device(device)
        self._shard = shard
        self._offload = offload or Offload()
        self._order: CaptureOrder | None = None
        self._filtered: dict[tuple[int, ...], Recorded] = {}
        self._stored: StoredAdapter | None = None
        self._writing: BackgroundWrite | None = None
        self._put_away()

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

    def watch(self, order: CaptureOrder | None) -> None:
        """Capture the pass that ``order`` names from now on; None ends it."""
        self._order = order
        self._filtered = {}

    def old_logprobs(
        self,
        sequences: Sequence[SampledSequence],
        micro_batches: Sequence[Sequence[int]] | None = None,
    ) -> list[TokenScores]:
        """Score the responses, without gradient, in the order given; see ``score_sequences``."""
        model: CausalModel = self.weights.compute
        with self.at_work(), self._watched("old_log_prob") as watching:
            scores = score_sequences(
                model,
                sequences,
                limit=self._log_prob_limit,
                device=self._device,
                micro_batches=micro_batches,
                shard=self._shard,
            )
            if self._order is not None:
                recorded = [_recorded(*pair) for pair in zip(sequences, scores, strict=True)]
                self._filtered = {item.token_ids: item for item in recorded if item.sampling.filters}
                if watching is not None:
                    watching.record(recorded)
        return scores

    def update(self, mini_batches: Sequence[MiniBatch]) -> UpdateResult:
        """One optimizer step per mini-batch; none where a captured step is to see prompts alone."""
        order = self._order
        with self.at_work(optimizer=True), self._watched("update") as watching:
            if order is not None and order.prompts_only:
                self._see_prompts(mini_batches[: order.mini_batches_per_epoch], watching)
                return self.trainer.skip_update()
            if watching is None:
                return self.trainer.update(mini_batches)

            def record(scores: Sequence[TokenScores]) -> None:
                watching.record(self._recorded_update(mini_batches[0], scores))
                watching.close()  # what later mini-batches see are other weights

            return self.trainer.update(mini_batches, on_first_scores=record)

    def _see_prompts(self, mini_batches: Sequence[MiniBatch], watching: StepCapture | None) -> None:
        model: CausalModel = self.weights.compute
        for batch in mini_batches:
            forward_prompts(
                model, batch, limit=self.trainer.settings.limit, device=self._device, shard=self._shard
            )
        if watching is not None:
            watching.record(prompts_recorded([ids for batch in mini_batches for ids in prompts_of(batch)]))

    def _recorded_update(self, batch: MiniBatch, scores: Sequence[TokenScores]) -> list[Recorded]:
        """Log-probs of the update's own forward; where the engine filters, the filtered ones of the old-log-prob pass."""
        return [
            self._filtered.get(sequence.token_ids)
            or Recorded(
                token_ids=sequence.token_ids,
                prompt_length=sequence.prompt_length,
                logprobs=scored.logprobs,
                sampling=SamplingParams(
                    max_new_tokens=len(scored.logprobs), temperature=sequence.temperature
                ),
            )
            for sequence, scored in zip(batch.sequences, scores, strict=True)
        ]

    def _watched(self, pass_name: str) -> AbstractContextManager[StepCapture | None]:
        order = self._order if self._order is not None and self._order.train_pass == pass_name else None
        return watched(
            self.model,
            order,
            side="train",
            pass_name=pass_name,
            version=self.weights_version,
            records=self._shard is None or self._shard.rank == 0,
        )

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, random generators and counters below ``folder``."""
        self._staged(folder, in_memory=False).write()

    def begin_save(self, folder: Path) -> None:
        """Copy the state to host memory and begin to write it; ``save_is_written`` says when that is done."""
        assert self._writing is None, "at most one save is under way"
        self._writing = BackgroundWrite(self._staged(folder, in_memory=True).write)

    def save_is_written(self, *, wait: bool) -> bool:
        """Whether what ``begin_save`` began has ended; True where there is nothing.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writing is None:
            return True
        if not wait and not self._writing.is_done:
            return False
        ending, self._writing = self._writing, None
        ending.finish()
        return True

    def _staged(self, folder: Path, *, in_memory: bool) -> StagedState:
        with self.at_work(optimizer=True):
            return stage_training_state(
                folder,
                self.weights.master,
                self.trainer.optimizer,
                self._counters(),
                adapter=self._stored_adapter(),
                in_memory=in_memory,
            )

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""
        with self.at_work(optimizer=True):
            state = load_training_state(
                folder, self.weights.master, self.trainer.optimizer, adapter=self._stored_adapter()
            )
            self.weights.refresh()
        self.trainer.updates = int(state.counters["updates"])
        self.trainer.optimizer_steps = int(state.counters["optimizer_steps"])

    def _counters(self) -> dict[str, int]:
        return {"updates": self.trainer.updates, "optimizer_steps": self.trainer.optimizer_steps}

    def _stored_adapter(self) -> StoredAdapter | None:
        """What a checkpoint says about the adapter; every rank calls it. The base never changes: it is read once."""
        if self.adapter is None:
            return None
        if self._stored is None:
            self._stored = StoredAdapter.of(
                self.adapter, base_fingerprints(self.weights.master, self.adapter)
            )
        return self._stored

    @contextmanager
    def at_work(self, *, optimizer: bool = False) -> Iterator[None]:
        """The weights, and if asked for the optimizer's state, are on the device inside; at rest afterwards."""
        if self._offload.parameters:
            self.weights.move(self._device)
        if optimizer and self._offload.optimizer:
            move_optimizer_state(self.trainer.optimizer, self._device)
        try:
            yield
        finally:
            self.weights.rest()
            self._put_away()

    def _put_away(self) -> None:
        if self._offload.parameters:
            self.weights.move(HOST)
        if self._offload.optimizer:
            move_optimizer_state(self.trainer.optimizer, HOST)


def _recorded(sequence: SampledSequence, scores: TokenScores) -> Recorded:
    return Recorded(
        token_ids=sequence.token_ids,
        prompt_length=len(sequence.prompt.token_ids),
        logprobs=scores.sampled_logprobs,
        sampling=sequence.sampling,
    )
