"""The planner's answer, as records: what the trainer runs and what ``trainfer plan`` prints."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The integers of one training step under trainfer's own rules.

    Example: 60 prompts, 12 samples each, 6 ranks, mini-batch of 60 prompts, micro-batch of 8 sequences
    give 720 sequences, 120 per rank, 1 mini-batch of 120 per rank in 15 micro-batches.
    """

    num_ranks: int
    data_parallel_size: int
    prompts_per_step: int
    sequences_per_prompt: int
    sequences_per_step: int
    sequences_per_rank: int
    mini_batches_per_epoch: int
    mini_batch_sequences: int
    """Sequences of one optimizer step, all ranks."""
    mini_batch_sequences_per_rank: int
    micro_batch_sequences_per_rank: int | None
    """None: micro-batches are filled up to ``micro_batch_tokens_per_rank`` instead."""
    micro_batch_tokens_per_rank: int | None
    log_prob_micro_batch_sequences_per_rank: int | None
    log_prob_micro_batch_tokens_per_rank: int | None
    ppo_epochs: int
    optimizer_steps_per_step: int
