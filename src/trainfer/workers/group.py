"""The interface of a group of workers: what ``run`` knows about who runs where.

A group holds an actor (trained), a rollout engine, and, where the KL term needs one, a
frozen ref. ``local_group`` runs them in this process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainfer.types import (
    Completion,
    GenerationRequest,
    SampledSequence,
    TokenScores,
    TrainingSequence,
)
from trainfer.workers.watching import CaptureOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What one update (all its optimizer steps) did."""

    metrics: dict[str, float]
    """Under verl's names, e.g. ``actor/pg_loss``; means over the optimizer steps."""
    optimizer_steps: int
    skipped_steps: int
    """Optimizer steps left out because a gradient was not finite, or because the step only watches prompts."""
    weights_version: int
    scores: tuple[TokenScores | None, ...]
    """Per sequence, under the policy at the start of the update, no filter applied; None for sequences outside
    the first mini-batch, which that policy did not see in the update."""

    @classmethod
    def left_out(cls, *, optimizer_steps: int, sequences: int, weights_version: int) -> "UpdateReport":
        """Of an update that saw prompts alone."""
        return cls(
            metrics={"actor/skipped_steps": float(optimizer_steps)},
            optimizer_steps=optimizer_steps,
            skipped_steps=optimizer_steps,
            weights_version=weights_version,
            scores=(None,) * sequences,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncProof:
    """Evidence that the rollout engine computes with the actor's weights."""

    weights_version: int
    tensors: int
    mismatched: tuple[str, ...]
    """Names whose fingerprints differ or are missing on one side; empty is proof."""

    @property
    def matches(self) -> bool:
        """True when every fingerprint agrees."""
        return not self.mismatched


class WorkerGroup(Protocol):
    """Everything ``run`` asks of the workers; ranks, devices and transport are theirs."""

    @property
    def weights_version(self) -> int:
        """Optimizer steps taken since the start of the run."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample, in the order of the requests."""
        ...

    def old_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses with the actor, without gradient."""
        ...

    def ref_logprobs(self, sequences: Sequence[SampledSequence]) -> list[TokenScores]:
        """Score the responses with the frozen ref."""
        ...

    def update(self, sequences: Sequence[TrainingSequence]) -> UpdateReport:
        """Train on one step's sequences: every epoch and mini-batch of the plan."""
        ...

    def sync_weights(self) -> SyncProof:
        """Hand the actor's weights to the engine and prove that they arrived."""
        ...

    def watch(self, order: CaptureOrder | None) -> str | None:
        """Capture both sides on every rank from now on, as ordered; None ends it.

        Returns:
            Why the engine cannot be watched, where it cannot: then nothing is captured.
        """
        ...

    def save_checkpoint(self, folder: Path) -> None:
        """Write model, optimizer and RNG state of every rank below ``folder``."""
        ...

    def begin_checkpoint(self, folder: Path) -> None:
        """As ``save_checkpoint``, but from a copy in host memory while training goes on; one at a time."""
        ...

    def checkpoint_is_written(self, *, wait: bool) -> bool:
        """Whether what ``begin_checkpoint`` began is on disk; ``wait``: come back only when it is.

        Raises:
            CheckpointError: a rank could not write.
        """
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` wrote."""
        ...

    def close(self) -> None:
        """End every worker."""
        ...
