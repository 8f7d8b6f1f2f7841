"""Runs the suite: plant, capture both sides, compare, score.

Takes seeds and a filter; gives scores. In this process, one case after another; dumps lie in a temporary folder and are
deleted as soon as they are compared, unless failures are to be kept.
"""

import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from trainfer.faults.answer import alarm_of, read_answer, score_case
from trainfer.faults.catalogue import chosen_faults, layout_of, make_case
from trainfer.faults.controls import CONTROLS
from trainfer.faults.fault import Control, Fault
from trainfer.faults.models import DTYPES
from trainfer.faults.pair import make_pair
from trainfer.faults.records import Case, ControlOutcome, Outcome, Scores
from trainfer.faults.sides import mean_gap, run_pair
from trainfer.integrations.dumps import compare

Progress = Callable[[int, int, str], None]
"""(done, total, what comes next)."""


def run_suite(
    seeds: int, *, only: str | None = None, out: Path | None = None, progress: Progress = lambda *_: None
) -> Scores:
    """Run all cases and controls.

    Args:
        seeds: Seeds 0 to seeds − 1.
        only: A family, a cause, a fault's name, or ``controls``.
        out: Keep dumps and reports of failures here.
        progress: Told before each case and at the end.

    Raises:
        ConfigError: ``only`` names nothing.
    """
    started = time.perf_counter()
    faults = [] if only == "controls" else chosen_faults(only)
    controls = CONTROLS if only in (None, "controls") else ()
    total, done = seeds * (len(faults) + len(controls)), 0
    outcomes: list[Outcome] = []
    alarms: list[ControlOutcome] = []
    with tempfile.TemporaryDirectory(prefix="trainfer-faults-") as scratch:
        for seed in range(seeds):
            for fault in faults:
                progress(done, total, f"{fault.name}, seed {seed}")
                outcomes.append(run_case(fault, seed, Path(scratch) / "case", keep=out))
                done += 1
            for control in controls:
                progress(done, total, f"{control.name}, seed {seed}")
                alarms.append(run_control(control, seed, Path(scratch) / "control", keep=out))
                done += 1
    progress(done, total, "")
    return Scores(
        outcomes=tuple(outcomes), controls=tuple(alarms), seeds=seeds, seconds=time.perf_counter() - started
    )


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
        return _raised(case, expected[0].cause, error, time.perf_counter() - started)
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


def _raised(case: Case, cause: str, error: Exception, seconds: float) -> Outcome:
    return Outcome(
        case=case, expected=(cause,), expected_module=None, answer=None, counted=True, ratio=None, top1=False, top3=False,
        seconds=seconds, error=f"{type(error).__name__}: {error}",
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
