"""When exact mode is violated: capture one sequence on both sides, and name the first module that differs.

Takes a step's sequences with both sides' log-probs; where a bit differs although it must not, samples and scores the
worst sequence once more, alone, under capture, compares the two dumps at once, and says what came out. Where the sequence
alone is equal, the difference needs the company of the others: then the whole step's sequences are captured.
``trainfer.exact=true`` ends the run with it, ``auto`` tells it once and goes on.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from trainfer.check.report.captured import StepVerdict
from trainfer.config.schema import TrainConfig
from trainfer.types import GenerationRequest, SampledSequence
from trainfer.workers.comparison import Job
from trainfer.workers.consistency import VIOLATION, Consistency, make_room
from trainfer.workers.group import WorkerGroup
from trainfer.workers.shaping import BITWISE, insist_on_exact

logger = logging.getLogger(__name__)

COMPARE_SECONDS = 600.0
"""Longest wait for one comparison."""


class Exactness:
    """Watches that what must be bitwise equal is."""

    def __init__(self, config: TrainConfig, consistency: Consistency, *, num_ranks: int) -> None:
        """Of one start of a run."""
        self._config = config
        self._consistency = consistency
        self._num_ranks = num_ranks
        self._is_told = False

    def check(
        self,
        group: WorkerGroup,
        step: int,
        sequences: Sequence[SampledSequence],
        ours: Sequence[Sequence[float] | None],
        agreement: dict[str, float],
    ) -> None:
        """Look at a step's agreement, after its weights were handed over.

        Raises:
            EngineError: ``trainfer.exact=true`` and some token differs; says where it begins.
        """
        if agreement.get(BITWISE, 1.0) == 1.0 or not must_be_exact(self._config):
            return
        insists = self._config.trainfer.exact == "true"
        if self._is_told and not insists:
            return
        self._is_told = True
        found = self._find(group, step, worst_sequence(sequences, ours), sequences)
        insist_on_exact(self._config, agreement, found)
        logger.warning(
            "step %d: %.3g %% of the tokens have other log-probs in the trainer than in the rollout, where exact mode "
            "should make them equal. %s",
            step,
            100 * (1 - agreement[BITWISE]),
            found,
        )

    def _find(
        self, group: WorkerGroup, step: int, worst: SampledSequence, sequences: Sequence[SampledSequence]
    ) -> str:
        alone = self._captured(group, step, [worst] * self._num_ranks, VIOLATION[0])
        if isinstance(alone, str):
            return alone
        if alone.first_module is not None or alone.verdict != "equal":
            return f"A capture of one sequence on both sides: {_described(alone)}"
        together = self._captured(group, step, sequences, VIOLATION[1])
        if isinstance(together, str):
            return f"One sequence alone is equal on both sides. {together}"
        if together.first_module is None and together.verdict == "equal":
            return (
                "A capture of both sides after the update finds them equal, one sequence alone and all of the step together: "
                f"the violation does not repeat. Report: {together.page}."
            )
        return (
            f"One sequence alone is equal on both sides; with the others of the step: {_described(together)}"
        )

    def _captured(
        self, group: WorkerGroup, step: int, sequences: Sequence[SampledSequence], name: str
    ) -> StepVerdict | str:
        """The verdict over ``sequences``, sampled and scored anew by the present weights, or why there is none."""
        folder = self._consistency.folder(step) / name
        job = Job(step=step, rollout=folder / "rollout", train=folder / "train", out=folder)
        try:
            make_room(folder)
            order = self._consistency.order(job.rollout, job.train, train_pass="old_log_prob", task="tensor")
        except OSError as error:
            return f"The first module cannot be named: {folder} cannot be written ({error.strerror})."
        reason = group.watch(order)
        if reason is not None:
            return f"The first module cannot be named: {reason}."
        requests = [_request(sequence, number) for number, sequence in enumerate(sequences)]
        completions = group.generate(requests)
        group.old_logprobs(
            [
                replace(
                    sequence,
                    response_ids=completion.token_ids,
                    rollout_logprobs=completion.logprobs,
                    finish_reason=completion.finish_reason,
                    weights_version=completion.weights_version,
                )
                for sequence, completion in zip(sequences, completions, strict=True)
            ]
        )
        group.watch(None)
        return self._consistency.compare_now(job, COMPARE_SECONDS)


def must_be_exact(config: TrainConfig) -> bool:
    """Insisted on, or to be had: the builtin engine in the trainer's own format."""
    if config.trainfer.exact != "auto":
        return config.trainfer.exact == "true"
    rollout, fsdp = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.fsdp_config
    return rollout.name == "builtin" and rollout.dtype == (fsdp.mixed_precision.param_dtype or fsdp.dtype)


def worst_sequence(
    sequences: Sequence[SampledSequence], ours: Sequence[Sequence[float] | None]
) -> SampledSequence:
    """The one with the largest difference of a token; one that is not finite is larger than any."""

    def size(index: int) -> float:
        mine = ours[index]
        if mine is None:
            return -1.0
        theirs = sequences[index].rollout_logprobs
        largest = [
            abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(mine, theirs, strict=True)
        ]
        return max(largest)

    return sequences[max(range(len(sequences)), key=size)]


def _request(sequence: SampledSequence, number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"violation/{number}",
        prompt_ids=sequence.prompt.token_ids,
        seed=sequence.seed,
        sampling=sequence.sampling,
    )


def _described(verdict: StepVerdict) -> str:
    first = verdict.first_module
    where = (
        f"the first module that differs is {first or 'the model itself'}"
        if first is not None
        else verdict.why
    )
    return f"{verdict.verdict}; {where}. Report: {verdict.page}."
