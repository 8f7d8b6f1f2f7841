"""A group of several ranks: one process tells all of them what to do and puts their answers together.

Implements ``workers.group.WorkerGroup`` over a ``Transport``. It divides requests, sequences and mini-batches among the
ranks so that nothing that is computed depends on their number but rounding, restores the order, and adds up what each
rank saw. Each rank holds actor, rollout and ref (``rank.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from trainfer.errors import CheckpointError
from trainfer.plan.division import deal
from trainfer.train.update.checkpoint_export import copy_model_files, find_training_state
from trainfer.train.update.checkpoint_rng import rng_file
from trainfer.train.update.logprob import ForwardLimit
from trainfer.train.update.schedule import mini_batches
from trainfer.train.update.trainer import StepStatistics, UpdateResult, update_metrics
from trainfer.types import (
    Completion,
    GenerationRequest,
    SampledSequence,
    TokenScores,
    TrainingSequence,
)
from trainfer.workers.group import SyncProof, UpdateReport
from trainfer.workers.local_group import ACTOR_FOLDER
from trainfer.workers.rank import (
    BeginSave,
    Counters,
    Generate,
    Load,
    RankSetup,
    Save,
    SaveIsWritten,
    Score,
    SendWeights,
    Transport,
    Update,
    Watch,
)
from trainfer.workers.settings import old_log_prob_limit, ref_log_prob_limit, trainer_settings
from trainfer.workers.shares import mini_batch_shares, shares
from trainfer.workers.watching import CaptureOrder
from trainfer.workers.weights import insist

T = TypeVar("T")


class RankedGroup:
    """See the module docstring."""

    def __init__(self, transport: Transport, setup: RankSetup) -> None:
        """``transport`` reaches ranks that were built from ``setup``."""
        self._transport = transport
        self._setup = setup
        self._counters = Counters(updates=0, weights_version=0)
        self._begun: Path | None = None
        """The checkpoint that ranks are writing."""

    @property
    def weights_version(self) -> int:
        """Optimizer steps taken since the start of the run."""
        return self._counters.weights_version

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample, in the order of the requests; neighbours, which share prompts, go to one rank."""
        lengths = [len(request.prompt_ids) for request in requests]
        dealt = deal(lengths, self._setup.plan.num_ranks, balanced=False)
        answers = self._transport.call(
            [Generate(requests=tuple(requests[index] for index in indices)) for indices in dealt]
        )
        completions = list(chain.from_iterable(answers))
        if on_tokens is not None:
            on_tokens(sum(len(completion.token_ids) for completion in completions))
        return completions

    def old_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses with the actor."""
        return self._score(sequences, old_log_prob_limit(self._setup.plan), with_ref=False)

    def ref_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses with the ref."""
        return self._score(sequences, ref_log_prob_limit(self._setup.plan), with_ref=True)

    def _score(
        self, sequences: Sequence[SampledSequence], limit: ForwardLimit, *, with_ref: bool
    ) -> list[TokenScores]:
        divided = shares(
            [len(sequence.token_ids) for sequence in sequences],
            self._setup.plan.data_parallel_size,
            limit,
            balanced=self._setup.config.trainer.balance_batch,
            prompts=[sequence.prompt.token_ids for sequence in sequences] if self._shares_prompts else None,
        )
        answers = self._transport.call(
            self._for_every_rank(
                [
                    Score(
                        sequences=tuple(sequences[index] for index in share.indices),
                        micro_batches=share.micro_batches,
                        with_ref=with_ref,
                    )
                    for share in divided
                ]
            )
        )
        scores: dict[int, TokenScores] = {}
        for share, answer in zip(divided, self._leading(answers), strict=True):
            scores.update(zip(share.indices, answer, strict=True))
        return [scores[index] for index in range(len(sequences))]

    def update(self, sequences: Sequence[TrainingSequence]) -> UpdateReport:
        """Every epoch and mini-batch of one step."""
        plan, actor = self._setup.plan, self._setup.config.actor_rollout_ref.actor
        settings = trainer_settings(self._setup.config, plan, total_steps=self._setup.total_steps)
        steps = mini_batches(
            len(sequences),
            mini_batch_sequences=plan.mini_batch_sequences,
            epochs=plan.ppo_epochs,
            shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
            update=self._counters.updates,
        )
        divided = [
            mini_batch_shares(
                [sequences[index] for index in step],
                plan.data_parallel_size,
                settings.limit,
                balanced=self._setup.config.trainer.balance_batch,
                share_prompts=self._shares_prompts,
            )
            for step in steps
        ]
        answers = self._transport.call(
            self._for_every_rank(
                [
                    Update(mini_batches=tuple(batch for _, batch in parts))
                    for parts in zip(*divided, strict=True)
                ]
            )
        )
        results = [result for result, _ in answers]
        self._counters = _agreed([counters for _, counters in answers])
        statistics = _added_up(results)
        if not statistics:
            return UpdateReport.left_out(
                optimizer_steps=len(steps), sequences=len(sequences), weights_version=self.weights_version
            )
        scores: list[TokenScores | None] = [None] * len(sequences)
        for (share, _), result in zip(divided[0], self._leading(results), strict=True):
            for index, score in zip(share.indices, result.first_scores, strict=True):
                scores[steps[0][index]] = score
        has_kl = sequences[0].ref_logprobs is not None
        return UpdateReport(
            metrics=update_metrics(statistics, kl_coef=settings.loss.kl_loss_coef if has_kl else None),
            optimizer_steps=len(steps),
            skipped_steps=sum(step.skipped for step in statistics),
            weights_version=self.weights_version,
            scores=tuple(scores),
        )

    def sync_weights(self) -> SyncProof:
        """Hand the actor's weights to every rank's engine and prove that they arrived."""
        proofs = self._transport.call([SendWeights()] * self._setup.plan.num_ranks)
        mismatched = dict.fromkeys(
            f"{name} (rank {rank})" for rank, proof in enumerate(proofs) for name in proof.mismatched
        )
        proof = replace(proofs[0], mismatched=tuple(mismatched))
        insist(proof)
        return proof

    def watch(self, order: CaptureOrder | None) -> str | None:
        """Capture both sides on every rank from now on, as ordered; None ends it."""
        answers = self._transport.call([Watch(order=order)] * self._setup.plan.num_ranks)
        return next((reason for reason in answers if reason is not None), None)

    def save_checkpoint(self, folder: Path) -> None:
        """Write ``actor/`` and ``huggingface/`` (config and tokenizer) below ``folder``.

        Raises:
            CheckpointError: a rank could not write, or wrote where this process cannot see it.
        """
        ranks = self._setup.plan.num_ranks
        self._transport.call([Save(folder=(folder / ACTOR_FOLDER).absolute())] * ranks)
        self._check_seen(folder)
        copy_model_files(self._setup.model_folder, folder)

    def begin_checkpoint(self, folder: Path) -> None:
        """As ``save_checkpoint``, but what takes long is done behind the training."""
        command = BeginSave(folder=(folder / ACTOR_FOLDER).absolute())
        self._transport.call([command] * self._setup.plan.num_ranks)
        self._begun = folder
        copy_model_files(self._setup.model_folder, folder)

    def checkpoint_is_written(self, *, wait: bool) -> bool:
        """Whether every rank has written what ``begin_checkpoint`` began.

        Raises:
            CheckpointError: a rank could not write, or wrote where this process cannot see it.
        """
        answers = self._transport.call([SaveIsWritten(wait=wait)] * self._setup.plan.num_ranks)
        if not all(answers):
            return False
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._check_seen(begun)
        return True

    def _check_seen(self, folder: Path) -> None:
        ranks = self._setup.plan.num_ranks
        unseen = [rank for rank in range(ranks) if not rng_file(folder / ACTOR_FOLDER, rank).is_file()]
        if unseen:
            raise CheckpointError(
                f"the files of rank(s) {', '.join(map(str, unseen))} are not in {folder}: trainer.default_local_dir must "
                "lie on a file system that all nodes share."
            )

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` of any number of ranks wrote."""
        state = find_training_state(folder).absolute()
        self._counters = _agreed(self._transport.call([Load(folder=state)] * self._setup.plan.num_ranks))

    def close(self) -> None:
        """End every rank."""
        self._transport.close()

    @property
    def _shares_prompts(self) -> bool:
        """False where ranks slice rows: no prompt is shared then."""
        return self._setup.plan.sequence_parallel_size == 1

    def _for_every_rank(self, per_share: Sequence[T]) -> list[T]:
        """Ranks that share sequences, which are neighbours, get the same."""
        return [item for item in per_share for _ in range(self._setup.plan.sequence_parallel_size)]

    def _leading(self, answers: Sequence[T]) -> Sequence[T]:
        """Of the first rank of those that share sequences."""
        return answers[:: self._setup.plan.sequence_parallel_size]


def _agreed(counters: Sequence[Counters]) -> Counters:
    assert all(other == counters[0] for other in counters), "ranks have taken different optimizer steps"
    return counters[0]


def _added_up(results: Sequence[UpdateResult]) -> list[StepStatistics]:
    """One record per optimizer step, the additive fields summed over all ranks."""
    return [_sum_of(steps) for steps in zip(*(result.steps for result in results), strict=True)]


def _sum_of(ranks: Sequence[StepStatistics]) -> StepStatistics:
    first = ranks[0]
    assert all(rank.skipped == first.skipped for rank in ranks), "ranks disagree on a skipped step"
    return replace(
        first,
        loss=sum(rank.loss for rank in ranks),
        pg_loss=sum(rank.pg_loss for rank in ranks),
        entropy=sum(rank.entropy for rank in ranks),
        kl_loss=sum(rank.kl_loss for rank in ranks),
        ppo_kl=sum(rank.ppo_kl for rank in ranks),
        pg_clipfrac=sum(rank.pg_clipfrac for rank in ranks),
        pg_clipfrac_lower=sum(rank.pg_clipfrac_lower for rank in ranks),
    )
