"""Validation: sample the held-out prompts and score the responses.

Takes inputs, workers and a step; gives scored sequences. Every validation of a run draws with the same seeds, so
two of them differ by the weights alone.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from trainfer.errors import DataError
from trainfer.train.journal.rollouts import RolloutRecord
from trainfer.train.metrics import validation_metrics
from trainfer.train.reward import score
from trainfer.train.rollout.sample import Purpose, collect, plan_rollout
from trainfer.types import Completion, GenerationRequest, SampledSequence, SamplingParams
from trainfer.workers.inputs import Inputs


class Sampler(Protocol):
    """Who samples: a group of workers, or a rollout worker alone."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """One completion per request, in their order."""
        ...


def validate(inputs: Inputs, group: Sampler, sampling: SamplingParams) -> tuple[RolloutRecord, ...]:
    """Sample and score every validation prompt, ``data.val_batch_size`` prompts at a time.

    Raises:
        DataError: there are no validation prompts.
    """
    if inputs.validation is None:
        raise DataError("there is nothing to validate on; set data.val_files to a Parquet or JSONL file.")
    prompts = inputs.validation.prompts
    batch = inputs.config.data.val_batch_size or len(prompts)
    records: list[RolloutRecord] = []
    for start in range(0, len(prompts), batch):
        rollout = plan_rollout(
            prompts[start : start + batch],
            samples_per_prompt=inputs.config.actor_rollout_ref.rollout.val_kwargs.n,
            sampling=sampling,
            run_seed=inputs.config.trainfer.seed,
            step=0,
            purpose=Purpose.VALIDATION,
        )
        sequences = collect(rollout, group.generate(rollout.requests), inputs.decoder)
        records.extend(map(_record, sequences))
    return tuple(records)


def _record(sequence: SampledSequence) -> RolloutRecord:
    return RolloutRecord(
        sequence=sequence, score=score_sequence(sequence), advantage=None, train_logprobs=None
    )


def score_sequence(sequence: SampledSequence) -> float:
    """The reward of one response, by its prompt's ``data_source``."""
    prompt = sequence.prompt
    return score(prompt.data_source, sequence.response_text, prompt.ground_truth)


def metrics_of(inputs: Inputs, records: tuple[RolloutRecord, ...]) -> dict[str, float]:
    """Mean score per data source under verl's ``val-core/*``."""
    return validation_metrics(
        [record.sequence for record in records],
        [record.score for record in records],
        samples_per_prompt=inputs.config.actor_rollout_ref.rollout.val_kwargs.n,
    )
