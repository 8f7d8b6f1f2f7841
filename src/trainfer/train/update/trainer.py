"""The update: forward and backward over micro-batches, clipping, optimizer, schedule.

Takes mini-batches of ``TrainingSequence``s and a model; changes the model's weights and gives one
``StepStatistics`` per optimizer step. It loads no model, moves no sequence between ranks and adds no
statistics over them: each rank's statistics are divided by the whole mini-batch's totals, so a group adds them up.

The gradient of a mini-batch is the sum of its micro-batches' gradients, each already divided by the
mini-batch's totals: micro-batch size, order and packing move nothing but rounding.

Old log-probs. A sequence whose ``old_logprobs`` is None takes the log-probs of its own forward,
detached: exactly the policy at the start of the step, if no optimizer step lies between, which is the
case with one mini-batch and one epoch. The ratio is then exactly 1 and a separate scoring pass is saved
(verl 0.6.1's on-policy shortcut). ``UpdateResult.first_scores`` holds the log-probs of the first
mini-batch's forward, made before any weight moved, for the agreement check: no pass is made for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainfer.exact.packed import CausalModel
from trainfer.exact.scores import forward_scores
from trainfer.exact.ulysses import SequenceShard, whole_rows
from trainfer.train.update.aggregate import LossAggregation, token_weight
from trainfer.train.update.batch import NOTHING_TO_LEARN, MicroBatch, MiniBatch, micro_batch
from trainfer.train.update.logprob import ForwardLimit, rows_by_sequence
from trainfer.train.update.loss import LossInputs, LossOutputs, LossSettings, grpo_loss
from trainfer.train.update.master import TrainableWeights
from trainfer.train.update.schedule import LearningRate
from trainfer.types import TokenScores


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Everything constant about the update."""

    loss: LossSettings
    aggregation: LossAggregation
    horizon: int
    """Divisor of seq-mean-token-sum-norm: the response limit in tokens."""
    limit: ForwardLimit
    """Of one forward and backward on this rank."""
    learning_rate: LearningRate
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    """Largest norm of a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """One optimizer step, as seen by one rank.

    All fields up to ``pg_clipfrac_lower`` add over ranks; the rest are equal on every rank.
    """

    loss: float
    pg_loss: float
    entropy: float
    """Aggregated as the loss is, as in verl."""
    kl_loss: float
    ppo_kl: float
    """Mean over trained tokens of old - new log-prob."""
    pg_clipfrac: float
    pg_clipfrac_lower: float
    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """True when the gradient was not finite and no weight changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """One update."""

    steps: tuple[StepStatistics, ...]
    first_scores: tuple[TokenScores, ...]
    """Log-probs of the policy at the start of the update, in the order of the first mini-batch's sequences.
    No filter is applied: ``sampled_logprobs`` equals ``logprobs``."""


class Trainer:
    """Owns optimizer and schedule of one rank's model."""

    def __init__(
        self,
        weights: TrainableWeights,
        settings: TrainerSettings,
        *,
        device: torch.device | str,
        shard: SequenceShard | None = None,
    ) -> None:
        """Build the optimizer.

        Args:
            weights: The model and what trains of it.
            settings: Constants of the update.
            device: Where micro-batches go.
            shard: This rank's place among those that share its sequences; None where it has them to itself.
        """
        self.weights = weights
        self.settings = settings
        self.updates = 0
        """Updates since the start of the run: the schedule's clock."""
        self.optimizer_steps = 0
        """Optimizer steps that changed weights: the weights version."""
        self._device = torch.device(device)
        self._shard = shard
        self._trainable = weights.trainable()
        self.optimizer = torch.optim.AdamW(
            self._trainable,
            lr=settings.learning_rate.at(0),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=self._device.type == "cuda",
        )

    def update(
        self,
        mini_batches: Sequence[MiniBatch],
        *,
        on_first_scores: Callable[[tuple[TokenScores, ...]], None] | None = None,
    ) -> UpdateResult:
        """One optimizer step per mini-batch, in order; then the schedule moves on by one.

        ``on_first_scores`` gets ``UpdateResult.first_scores`` before any weight moves.
        """
        stored = all(s.old_logprobs is not None for batch in mini_batches for s in batch.sequences)
        assert stored or len(mini_batches) == 1, "a second optimizer step needs stored old log-probs"
        learning_rate = self.settings.learning_rate.at(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        steps: list[StepStatistics] = []
        first_scores: tuple[TokenScores, ...] = ()
        for number, mini_batch in enumerate(mini_batches):
            sums, scores = self.forward_backward(mini_batch)
            if number == 0:
                first_scores = tuple(scores)
                if on_first_scores is not None:
                    on_first_scores(first_scores)
            grad_norm, skipped = self._optimizer_step()
            steps.append(
                _step_statistics(
                    sums,
                    tokens=mini_batch.totals.tokens,
                    grad_norm=grad_norm,
                    lr=learning_rate,
                    skipped=skipped,
                )
            )
        self.updates += 1
        return UpdateResult(steps=tuple(steps), first_scores=first_scores)

    def skip_update(self) -> UpdateResult:
        """An update that is left out: no weight moves, the schedule and the order of later updates do."""
        self.updates += 1
        return UpdateResult(steps=(), first_scores=())

    def forward_backward(self, mini_batch: MiniBatch) -> tuple[Tensor, list[TokenScores]]:
        """Add the mini-batch's gradient to ``.grad`` of the master parameters.

        Returns:
            The summed fields of ``LossOutputs`` as one float32 tensor, and every sequence's log-probs in this
            forward, in the order of the sequences.
        """
        sequences = mini_batch.sequences
        token_weights = [
            token_weight(
                self.settings.aggregation,
                trained_tokens=sum(sequence.loss_mask),
                totals=mini_batch.totals,
                horizon=self.settings.horizon,
            )
            for sequence in sequences
        ]
        sums = torch.zeros(7)
        scores: dict[int, TokenScores] = {}
        parts = mini_batch.micro_batches
        if parts is None:
            parts = self.settings.limit.split(
                [len(sequence.token_ids) for sequence in sequences],
                [sequence.token_ids[: sequence.prompt_length] for sequence in sequences],
            )
        for number, indices in enumerate(parts):
            batch = micro_batch(
                [sequences[index] for index in indices] or [NOTHING_TO_LEARN],
                [token_weights[index] for index in indices] or [0.0],
                device=self._device,
                shard=self._shard,
            )
            self.weights.prepare_backward(last=number == len(parts) - 1)
            loss, logprobs_S, entropies_S = self._loss(batch)
            loss.loss.backward()
            sums += _summed(loss).cpu()
            rows = self._whole(logprobs_S, batch), self._whole(entropies_S, batch)
            scores.update(zip(indices, _scores(*rows, batch.response_lengths), strict=bool(indices)))
        return sums, [scores[index] for index in range(len(sequences))]

    def _loss(self, batch: MicroBatch) -> tuple[LossOutputs, Tensor, Tensor]:
        """The loss with its graph; log-probs and entropies detached."""
        model: CausalModel = self.weights.compute
        logprobs_S, entropies_S = forward_scores(
            model,
            batch.packed,
            batch.temperatures_S,
            entropy_gradient=self.settings.loss.entropy_coeff != 0.0,
        )
        old_S = batch.old_logprobs_S
        inputs = LossInputs(
            logprobs_S=logprobs_S,
            old_logprobs_S=logprobs_S.detach() if old_S is None else old_S,
            advantages_S=batch.advantages_S,
            mask_S=batch.mask_S,
            token_weights_S=batch.token_weights_S,
            entropies_S=entropies_S,
            ref_logprobs_S=batch.ref_logprobs_S,
            rollout_weights_S=batch.rollout_weights_S,
        )
        return grpo_loss(inputs, self.settings.loss), logprobs_S.detach(), entropies_S.detach()

    def _whole(self, values_S: Tensor, batch: MicroBatch) -> Tensor:
        """With the rows of the ranks that share these sequences."""
        if self._shard is None or batch.sliced is None:
            return values_S
        return whole_rows(values_S, batch.sliced, self._shard)

    def _optimizer_step(self) -> tuple[float, bool]:
        """Clip, step, clear; a gradient that is not finite changes nothing."""
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # of sharded gradients: a sum over ranks is still to be made
            norm = norm.full_tensor()
        grad_norm = norm.item()
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            torch.nn.utils.clip_grads_with_norm_(self._trainable, self.settings.grad_clip, norm)
            self.optimizer.step()
            self.weights.refresh()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped


def update_metrics(steps: Sequence[StepStatistics], *, kl_coef: float | None) -> dict[str, float]:
    """Means over the optimizer steps, under verl's names; ``actor/lr`` is the one that was used.

    The gradient norm is averaged over the steps that were not skipped; ``actor/skipped_steps`` counts the others.
    ``kl_coef`` None is a loss without KL term: its two metrics are left out, as in verl.
    """
    kl = (
        {}
        if kl_coef is None
        else {"actor/kl_loss": fmean(s.kl_loss for s in steps), "actor/kl_coef": kl_coef}
    )
    norms = [step.grad_norm for step in steps if not step.skipped]
    return {
        "actor/loss": fmean(step.loss for step in steps),
        "actor/pg_loss": fmean(step.pg_loss for step in steps),
        "actor/entropy": fmean(step.entropy for step in steps),
        **kl,
        "actor/ppo_kl": fmean(step.ppo_kl for step in steps),
        "actor/pg_clipfrac": fmean(step.pg_clipfrac for step in steps),
        "actor/pg_clipfrac_lower": fmean(step.pg_clipfrac_lower for step in steps),
        **({"actor/grad_norm": fmean(norms)} if norms else {}),
        "actor/lr": steps[-1].lr,
        "actor/skipped_steps": float(sum(step.skipped for step in steps)),
    }


def _summed(loss: LossOutputs) -> Tensor:
    """The fields that add over micro-batches, in the order of ``_step_statistics``."""
    return torch.stack(
        [
            loss.loss.detach(),
            loss.pg_loss,
            loss.entropy,
            loss.kl_loss,
            loss.ppo_kl_sum,
            loss.clipped_tokens,
            loss.clipped_lower_tokens,
        ]
    )


def _step_statistics(
    sums: Tensor, *, tokens: int, grad_norm: float, lr: float, skipped: bool
) -> StepStatistics:
    loss, pg_loss, entropy, kl_loss, ppo_kl_sum, clipped, clipped_lower = sums.tolist()
    tokens = max(tokens, 1)
    return StepStatistics(
        loss=loss,
        pg_loss=pg_loss,
        entropy=entropy,
        kl_loss=kl_loss,
        ppo_kl=ppo_kl_sum / tokens,
        pg_clipfrac=clipped / tokens,
        pg_clipfrac_lower=clipped_lower / tokens,
        grad_norm=grad_norm,
        lr=lr,
        skipped=skipped,
    )


def _scores(logprobs_S: Tensor, entropies_S: Tensor, lengths: Sequence[int]) -> list[TokenScores]:
    logprobs = rows_by_sequence(logprobs_S.tolist(), lengths)
    entropies = rows_by_sequence(entropies_S.tolist(), lengths)
    return [
        TokenScores(logprobs=row, sampled_logprobs=row, entropies=entropy)
        for row, entropy in zip(logprobs, entropies, strict=True)
    ]
