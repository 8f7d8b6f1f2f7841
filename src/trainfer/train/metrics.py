"""What a step's batch looked like, in numbers under verl's names.

Takes the sampled sequences with their scores and advantages, and how long each stage took; gives
flat name -> float mappings. It knows no model and no logger.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from statistics import fmean
from typing import Protocol

from trainfer.types import SampledSequence, TrainingSequence


def batch_metrics(
    sequences: Sequence[SampledSequence],
    *,
    scores: Sequence[float],
    rewards: Sequence[float],
    training: Sequence[TrainingSequence],
) -> dict[str, float]:
    """Scores, rewards, advantages and lengths of one step.

    ``critic/score/*`` and ``critic/rewards/*`` are over sequences (rewards are scores minus what a
    KL term took), ``critic/advantages/*`` over tokens that train, as in verl's
    ``compute_data_metrics``; ``critic/returns/*`` are the same numbers, since GRPO has no critic. ``*/clip_ratio`` is the share of responses cut at their own limit of new
    tokens (verl: as long as the widest of the batch), and ``global_seqlen/*`` counts prompt + response.
    """
    advantages = list(
        chain.from_iterable(compress(sequence.advantages, sequence.loss_mask) for sequence in training)
    )
    response_lengths = [len(sequence.response_ids) for sequence in sequences]
    prompt_lengths = [len(sequence.prompt.token_ids) for sequence in sequences]
    lengths = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    at_limit = [
        float(length >= sequence.sampling.max_new_tokens)
        for length, sequence in zip(response_lengths, sequences, strict=True)
    ]
    return {
        **_mean_max_min("critic/score", scores),
        **_mean_max_min("critic/rewards", rewards),
        **_mean_max_min("critic/advantages", advantages or [0.0]),
        **_mean_max_min("critic/returns", advantages or [0.0]),
        **_mean_max_min("response_length", response_lengths),
        "response_length/clip_ratio": fmean(at_limit),
        **_mean_max_min("prompt_length", prompt_lengths),
        **_mean_max_min("global_seqlen", lengths),
        "global_seqlen/minmax_diff": float(max(lengths) - min(lengths)),
    }


def timing_metrics(seconds: Mapping[str, float], *, total_tokens: int, num_ranks: int) -> dict[str, float]:
    """``timing_s/STAGE`` and verl's throughput: tokens of prompts and responses per second and rank.

    ``seconds`` must hold ``step``.
    """
    step_s = seconds["step"]
    return {
        **{f"timing_s/{stage}": value for stage, value in seconds.items()},
        "perf/total_num_tokens": float(total_tokens),
        "perf/time_per_step": step_s,
        "perf/throughput": total_tokens / (step_s * num_ranks),
    }


def validation_metrics(
    sequences: Sequence[SampledSequence], scores: Sequence[float], *, samples_per_prompt: int
) -> dict[str, float]:
    """Mean score per data source, under verl's ``val-core/SOURCE/reward/mean@N``."""
    by_source: dict[str, list[float]] = {}
    for sequence, value in zip(sequences, scores, strict=True):
        by_source.setdefault(sequence.prompt.data_source, []).append(value)
    return {
        f"val-core/{source}/reward/mean@{samples_per_prompt}": fmean(values)
        for source, values in by_source.items()
    }


def _mean_max_min(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": fmean(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


class Watcher(Protocol):
    """Somebody who wants to know what is going on, e.g. a progress display."""

    def stage(self, name: str) -> None:
        """The stage that begins now, under its ``timing_s`` name."""
        ...

    def tokens(self, count: int) -> None:
        """So many more tokens were sampled."""
        ...


class Nobody:
    """A ``Watcher`` that does not look."""

    def stage(self, name: str) -> None:
        """Ignore it."""

    def tokens(self, count: int) -> None:
        """Ignore them."""


class StageClock:
    """Seconds per stage of one step."""

    def __init__(self, watcher: Watcher) -> None:
        """Start the step."""
        self.watcher = watcher
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; a name used twice adds up."""
        self.watcher.stage(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Of every stage so far, and of the step under ``step``."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
