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
class Span:
    """A number that the lengths of the sequences decide: at least ``min``, at most ``max``."""

    min: int
    max: int


Number = int | Span | None
"""None where a value that it needs is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """What the sizes become, under one rule set. Units are in the names; ranks are data-parallel ranks.

    Example: 60 prompts x 12 samples on 6 GPUs are 720 sequences, 120 a rank; in micro-batches of 8 that
    is 15 forwards and backwards for 1 optimizer step.
    """

    num_gpus: Number
    data_parallel_size: Number
    prompts_per_step: Number
    sequences_per_step: Number
    """Real sequences, without padding."""
    sequences_per_rank: Number
    """With the padding that the rule set adds."""
    rollout_replicas: Number
    sequences_per_replica: Number
    mini_batch_sequences_per_rank: Number
    mini_batches_per_epoch: Number
    micro_batch_sequences_per_rank: Number
    gradient_accumulation_steps: Number
    """Micro-batches of one (whole) mini-batch on one rank."""
    optimizer_steps_per_step: Number
    """All epochs."""
    log_prob_forwards_per_rank: Number
    ref_log_prob_forwards_per_rank: Number
    """0 where no reference model is used."""
    padding_sequences: Number
    """Synthetic sequences that the rule set adds to a step, all ranks."""
    learning_rate_steps_per_step: Number
    validation_sequences_per_prompt: Number
    validation_padded_to_multiple_of: Number
    """Sequences that are added to a validation batch and cut away again make it a multiple of this; 1: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One line of msProbe's shape-alignment checklist."""

    name: str
    keys: tuple[str, ...]
    value: Value
    required: Value
    ok: bool
    remark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """msProbe's checklist; trainfer's own capture needs none of it."""

    conditions: tuple[Condition, ...]

    @property
    def ready(self) -> bool:
        """True when every condition holds."""
        return all(condition.ok for condition in self.conditions)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRow:
    """One configuration value as the plan shows it."""

    value: object
    source: str
    """``FILE:LINE``, ``override`` or ``default``."""
    beaten: tuple[str, ...] = ()
    """What it replaced, as ``60 (run.sh:7)``, latest first."""
    unknown: str | None = None
    """Why the value cannot be known, where it cannot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShape:
    """One batch tensor at one stage, under the name that the system gives it."""

    stage: str
    name: str
    shape: tuple[str, ...]
    """Numbers, or ``≤ 16384`` where lengths decide."""
    layout: str
    """``padded``, ``nested`` (one length a row) or ``packed`` (one row of tokens)."""

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(self.shape)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One part of the memory of one GPU."""

    name: str
    gib: float
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory of one GPU, from the model's sizes; see ``plan.memory`` for what it leaves out."""

    parameters: int
    parts: tuple[MemoryPart, ...]
    uncertainty: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that ``trainfer plan`` says about one input."""

    rules: str
    system: str
    """What the rule set stands for, with its release."""
    reason: str
    """Why this rule set was taken."""
    values: Mapping[str, ValueRow]
    derived: Derived
    problems: tuple[Problem, ...]
    alignment: Alignment
    tensors: tuple[TensorShape, ...]
    memory: MemoryEstimate | None
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """False exactly when some problem is an error."""
        return not any(problem.severity == "error" for problem in self.problems)
