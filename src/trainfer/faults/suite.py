"""Runs the suite: plant, capture both sides, compare, score.

Takes seeds and a filter; gives scores. In this process, one case after another, or in several; dumps lie in a temporary
folder and are deleted as soon as they are compared, unless failures are to be kept.
"""

import math
import multiprocessing
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from trainfer.faults.answer import alarm_of, read_answer, score_case
from trainfer.faults.catalogue import chosen_faults, layout_of, make_case
from trainfer.faults.fault import Control, Fault
from trainfer.faults.generators import Generator, controls_of, every_control, every_fault, faults_of
from trainfer.faults.models import DTYPES
from trainfer.faults.pair import make_pair
from trainfer.faults.records import Case, ControlOutcome, Expected, Outcome, Scores
from trainfer.faults.sides import mean_gap, run_pair
from trainfer.integrations.dumps import compare

Progress = Callable[[int, int, str], None]
"""(done, total, what ended last)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One case or control; names only, so that it can go to another process."""

    name: str
    seed: int
    is_control: bool

    def run(self, keep: Path | None) -> Outcome | ControlOutcome:
        """Run it in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="trainfer-faults-") as scratch:
            if self.is_control:
                control = next(item for item in every_control() if item.name == self.name)
                return run_control(control, self.seed, Path(scratch) / "control", keep=keep)
            return run_case(every_fault()[self.name], self.seed, Path(scratch) / "case", keep=keep)


def plan_jobs(seeds: int, only: str | None, generator: Generator = Generator.FIRST) -> list[Job]:
    """All cases and controls, seed by seed.

    Raises:
        ConfigError: ``only`` names nothing.
    """
    faults = [] if only == "controls" else chosen_faults(only, faults_of(generator))
    controls = controls_of(generator) if only in (None, "controls") else ()
    return [
        job
        for seed in range(seeds)
        for job in (
            *(Job(name=fault.name, seed=seed, is_control=False) for fault in faults),
            *(Job(name=control.name, seed=seed, is_control=True) for control in controls),
        )
    ]


def run_suite(
    seeds: int,
    *,
    only: str | None = None,
    generator: Generator = Generator.FIRST,
    out: Path | None = None,
    workers: int = 1,
    progress: Progress = lambda *_: None,
) -> Scores:
    """Run all cases and controls.

    Args:
        seeds: Seeds 0 to seeds − 1.
        only: A family, a cause, a fault's name, or ``controls``.
        generator: Whose faults and controls.
        out: Keep dumps and reports of failures here.
        workers: Processes; 1 is this one. Results do not depend on it.
        progress: Told as cases end.

    Raises:
        ConfigError: ``only`` names nothing.
    """
    started = time.perf_counter()
    jobs = plan_jobs(seeds, only, generator)
    progress(0, len(jobs), "")
    done: list[Outcome | ControlOutcome] = []
    with ExitStack() as stack:
        results = (job.run(out) for job in jobs)
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(
                ProcessPoolExecutor(workers, mp_context=context, initializer=one_thread)
            )
            results = pool.map(Job.run, jobs, [out] * len(jobs))
        for job, result in zip(jobs, results, strict=True):
            done.append(result)
            progress(len(done), len(jobs), f"{job.name}, seed {job.seed}")
    return Scores(
        outcomes=tuple(item for item in done if isinstance(item, Outcome)),
        controls=tuple(item for item in done if isinstance(item, ControlOutcome)),
        seeds=seeds,
        seconds=time.perf_counter() - started,
        generator=generator,
    )


def one_thread() -> None:
    """Threads do not help models of this size."""
    torch.set_num_threads(1)


def run_case(fault: Fault, seed: int, folder: Path, *, keep: Path | None = None) -> Outcome:
    """One fault with one seed; ``folder`` is gone afterwards."""
    started = time.perf_counter()
    case, layout = make_case(fault, seed), layout_of(fault, seed)
    pair = make_pair(case, layout=layout)
    expected = list(fault.plant(pair))
    try:
        steps = run_pair(pair, folder)
        result = compare(folder / "rollout", folder / "train", model=pair.clean)
        answer = read_answer(result)
    except Exception as error:  # noqa: BLE001  (what raises is a failure of the case, shown with its words)
        shutil.rmtree(folder, ignore_errors=True)
        return _raised(case, expected[0], error, time.perf_counter() - started)
    outcome = score_case(
        case, expected, answer, steps[-1][0].batch,
        gap=mean_gap(steps), noise=clean_noise(case, pair.train.layout), seconds=time.perf_counter() - started,
    )  # fmt: skip
    if keep is not None and is_failure(outcome):
        kept = keep / f"{case.fault.replace('/', '-')}-seed{seed}"
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        result.write(kept / "report")
    shutil.rmtree(folder)
    return outcome


def is_failure(outcome: Outcome) -> bool:
    """A counted case with a wrong module or family."""
    return outcome.counted and (outcome.top1 is False or not outcome.family)


def _raised(case: Case, expected: Expected, error: Exception, seconds: float) -> Outcome:
    module = expected.modules[0] if expected.modules else None
    found = None if module is None else False
    return Outcome(
        case=case, expected=(expected.cause,), expected_module=module, answer=None, counted=True, ratio=None, top1=found,
        top3=found, seconds=seconds, error=f"{type(error).__name__}: {error}",
    )  # fmt: skip


def clean_noise(case: Case, layout: str) -> float:
    """Mean |Δ log p| of the same pair without its fault, at least the dtype's unit roundoff."""
    clean = Case(
        fault="none", cause="none", seed=case.seed, architecture=case.architecture, dtype=case.dtype, side=case.side,
        layer=0, magnitude=None,
    )  # fmt: skip
    gap = mean_gap(run_pair(make_pair(clean, layout=layout)))
    floor = torch.finfo(DTYPES[case.dtype]).eps / 2
    return floor if math.isnan(gap) else max(gap, floor)


def run_control(control: Control, seed: int, folder: Path, *, keep: Path | None = None) -> ControlOutcome:
    """One control with one seed."""
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = control.run(seed, str(folder))
        alarm = alarm_of(answer, control.allowed)
    except Exception as error:  # noqa: BLE001  (what raises is an alarm, shown with its words)
        answer, alarm = None, f"{type(error).__name__}: {error}"
    if keep is not None and alarm and folder.exists():
        kept = keep / f"{control.name.replace(' ', '-')}-seed{seed}"
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        if answer is not None:
            (kept / "summary.txt").write_text(answer.text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    return ControlOutcome(
        name=control.name, seed=seed, alarm=alarm, answer=answer, seconds=time.perf_counter() - started
    )


def failures(scores: Scores) -> Iterator[Outcome]:
    """Counted cases with a wrong module or family."""
    return (outcome for outcome in scores.outcomes if is_failure(outcome))
