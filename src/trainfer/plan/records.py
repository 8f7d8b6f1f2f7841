"""The planner's answer, as records: what the trainer runs and what ``trainfer plan`` prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Value = str | int | float | bool | None
"""A configuration value as far as the planner looks at it."""

Severity = Literal["error", "warning"]
When = Literal["config", "init", "run", "silent"]
"""When the system that is planned for would notice: its own config check, the construction of its
workers, the first step, or never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with the numbers."""

    severity: Severity
    when: When
    code: str
    keys: tuple[str, ...]
    """Full dotted names of the keys that take part."""
    message: str
    """The value, the rule and the remedy."""
    upstream_message: str | None = None
    """What verl itself would print; None where it prints nothing."""
    suggestions: tuple[Mapping[str, Value], ...] = ()
    """Overrides, nearest first; each makes the whole plan legal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The integers of one training step under trainfer's own rules.

    Example: 60 prompts, 12 samples each, 6 ranks, mini-batch of 60 prompts, micro-batch of 8 sequences
    give 720 sequences, 120 per rank, 1 mini-batch of 120 per rank in 15 micro-batches.
    A *data-parallel rank* is one rank, or the ``sequence_parallel_size`` ranks that share its sequences.
    """

    num_ranks: int
    data_parallel_size: int
    sequence_parallel_size: int
    rollout_replicas: int
    """Engines that generate at the same time; each spans ``num_ranks / rollout_replicas`` ranks."""
    prompts_per_step: int
    sequences_per_prompt: int
    sequences_per_step: int
    sequences_per_rank: int
    """Per data-parallel rank, as all ``*_per_rank`` numbers here."""
    max_sequence_tokens: int
    """Longest prompt plus longest response."""
    mini_batches_per_epoch: int
    mini_batch_sequences: int
    """Sequences of one optimizer step, all ranks."""
    mini_batch_sequences_per_rank: int
    micro_batch_sequences_per_rank: int | None
    """None: micro-batches are filled up to ``micro_batch_tokens_per_rank`` instead."""
    micro_batch_tokens_per_rank: int | None
    gradient_accumulation_steps: int | None
    """Micro-batches of one optimizer step on one rank; None where tokens decide."""
    log_prob_micro_batch_sequences_per_rank: int | None
    log_prob_micro_batch_tokens_per_rank: int | None
    ref_log_prob_micro_batch_sequences_per_rank: int | None
    ref_log_prob_micro_batch_tokens_per_rank: int | None
    ppo_epochs: int
    optimizer_steps_per_step: int
