"""A group in this process: one rank that holds actor, rollout and, where needed, ref.

Implements ``workers.group.WorkerGroup``. It splits an update's sequences into mini-batches (the plan's
sizes, the shuffle's order); everything else it hands on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.checkpoint_export import copy_model_files, find_training_state
from trainfer.train.update.schedule import mini_batches
from trainfer.train.update.trainer import update_metrics
from trainfer.types import (
    Completion,
    GenerationRequest,
    SampledSequence,
    TokenScores,
    TrainingSequence,
)
from trainfer.workers.actor import ActorWorker
from trainfer.workers.group import SyncProof, UpdateReport
from trainfer.workers.ref import Ref
from trainfer.workers.rollout import NOT_HERE, RolloutWorker
from trainfer.workers.watching import CaptureOrder
from trainfer.workers.weights import sync_weights

ACTOR_FOLDER = "actor"
"""Below a checkpoint, as in verl's."""


class LocalGroup:
    """See the module docstring.

    Args:
        actor: Trains.
        rollout: Samples.
        ref: None where no KL term needs it.
        rollout_dtype: Format in which the engine computes.
        sends_merged: Whether the engine gets an adapter merged into the weights.
        mini_batch_sequences: Sequences of one optimizer step.
        epochs: Passes over an update's sequences.
        shuffle_seed: See ``schedule.mini_batches``.
        model_folder: Its config and tokenizer go into every checkpoint.
    """

    def __init__(
        self,
        *,
        actor: ActorWorker,
        rollout: RolloutWorker,
        ref: Ref | None,
        rollout_dtype: torch.dtype,
        sends_merged: bool = False,
        mini_batch_sequences: int,
        epochs: int,
        shuffle_seed: int | None,
        model_folder: Path,
    ) -> None:
        self._actor = actor
        self._rollout = rollout
        self._ref = ref
        self._rollout_dtype = rollout_dtype
        self._sends_merged = sends_merged
        self._mini_batch_sequences = mini_batch_sequences
        self._epochs = epochs
        self._shuffle_seed = shuffle_seed
        self._model_folder = model_folder

    @property
    def weights_version(self) -> int:
        """Optimizer steps taken since the start of the run."""
        return self._actor.weights_version

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample, in the order of the requests."""
        return self._rollout.generate(requests, on_tokens=on_tokens)

    def old_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses with the actor."""
        return self._actor.old_logprobs(sequences)

    def ref_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses with the ref."""
        assert self._ref is not None, "a ref is asked only where the configuration needs one"
        return self._ref.ref_logprobs(sequences)

    def update(self, sequences: Sequence[TrainingSequence]) -> UpdateReport:
        """Every epoch and mini-batch of one step."""
        steps = mini_batches(
            len(sequences),
            mini_batch_sequences=self._mini_batch_sequences,
            epochs=self._epochs,
            shuffle_seed=self._shuffle_seed,
            update=self._actor.updates,
        )
        result = self._actor.update([MiniBatch.whole([sequences[i] for i in step]) for step in steps])
        if not result.steps:
            return UpdateReport.left_out(
                optimizer_steps=len(steps), sequences=len(sequences), weights_version=self.weights_version
            )
        has_kl = sequences[0].ref_logprobs is not None
        scores: list[TokenScores | None] = [None] * len(sequences)
        for index, score in zip(steps[0], result.first_scores, strict=True):
            scores[index] = score
        return UpdateReport(
            metrics=update_metrics(result.steps, kl_coef=self._actor.kl_coef if has_kl else None),
            optimizer_steps=len(steps),
            skipped_steps=sum(step.skipped for step in result.steps),
            weights_version=self._actor.weights_version,
            scores=tuple(scores),
        )

    def sync_weights(self) -> SyncProof:
        """Hand the actor's weights to the engine and prove that they arrived."""
        return sync_weights(
            self._actor.weights.master if self._sends_merged else self._actor.model,
            self._rollout,
            version=self._actor.weights_version,
            dtype=self._rollout_dtype,
            merged=self._actor.adapter if self._sends_merged else None,
        )

    def watch(self, order: CaptureOrder | None) -> str | None:
        """Capture both sides from now on, as ordered; None ends it."""
        if order is not None and self._rollout.module is None:
            return NOT_HERE
        self._rollout.watch(order)
        self._actor.watch(order)
        return None

    def save_checkpoint(self, folder: Path) -> None:
        """Write ``actor/`` and ``huggingface/`` (config and tokenizer) below ``folder``."""
        self._actor.save(folder / ACTOR_FOLDER)
        copy_model_files(self._model_folder, folder)

    def begin_checkpoint(self, folder: Path) -> None:
        """As ``save_checkpoint``, but what takes long is done behind the training."""
        self._actor.begin_save(folder / ACTOR_FOLDER)
        copy_model_files(self._model_folder, folder)

    def checkpoint_is_written(self, *, wait: bool) -> bool:
        """Whether what ``begin_checkpoint`` began is on disk."""
        return self._actor.save_is_written(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` wrote; the engine has the weights only after ``sync_weights``."""
        self._actor.load(find_training_state(folder))

    def close(self) -> None:
        """Free the engine."""
        self._rollout.close()
