"""Captured steps: which ones, where their dumps lie, and what the comparison of both sides says.

Takes ``trainfer.consistency`` and the environment; tells the group to watch during a captured step, hands the two dumps
to a comparison behind the training, and reports its verdict when it is there. Changes nothing of what is trained,
but for ``prompts_only``, whose step sees prompts alone and steps no optimizer. Nothing that goes wrong here ends a run.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainfer.check.report.captured import PAGE, RESULT, StepVerdict
from trainfer.config.section_trainfer import ConsistencyConfig
from trainfer.errors import ConfigError
from trainfer.plan.records import StepPlan
from trainfer.workers.comparison import LOG, Comparisons, Finished, Job
from trainfer.workers.group import WorkerGroup
from trainfer.workers.watching import CaptureOrder

logger = logging.getLogger(__name__)

SIDES = ("rollout", "train")
PROMPTS_ONLY_SIDES = ("generate_sequences", "update_actor")
"""The folder names of the published prompts-only recipe."""
VIOLATION = ("violation", "violation_batch")
"""Below a step's folder, where exact mode was violated: one sequence, and all of the step."""
TABLES = ("modules.csv", "modules.xlsx")
SHARE_OF_FREE_DISK = 0.5
"""No captured step writes more than this share of what is free."""
LEAST_BYTES = 1 << 20
LAST_WAIT_SECONDS = 900.0
"""How long the end of a run waits for its comparisons."""
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """What the environment asks for: the variables of the published recipe."""

    dump_on: bool
    prompts_only: bool


def read_switches(environment: Mapping[str, str]) -> Switches:
    """``DUMP_ON`` and ``PROMPTS_ONLY``; unset is off.

    Raises:
        ConfigError: one is neither on nor off.
    """
    return Switches(dump_on=_is_on(environment, "DUMP_ON"), prompts_only=_is_on(environment, "PROMPTS_ONLY"))


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise ConfigError(f"the environment has {name}={value!r}; set it to 1 or 0, or leave it out.")
    return value in _ON


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedSteps:
    """Which steps are captured, counted from 1."""

    steps: frozenset[int]
    every: int
    """0: only ``steps``."""

    @classmethod
    def of(cls, config: ConsistencyConfig, switches: Switches, *, first_step: int) -> "CapturedSteps":
        """0 in the configuration is step 1; ``DUMP_ON`` alone is the first step that this start trains."""
        steps = {max(step, 1) for step in config.steps}
        if switches.dump_on and not steps and not config.every:
            steps = {first_step}
        return cls(steps=frozenset(steps), every=config.every)

    def __contains__(self, step: int) -> bool:
        return step in self.steps or (self.every > 0 and step % self.every == 0)


class Consistency:
    """The captures of one start of a run."""

    def __init__(
        self,
        config: ConsistencyConfig,
        switches: Switches,
        *,
        run_folder: Path,
        first_step: int,
        plan: StepPlan,
        model_folder: Path,
        run_config: Mapping[str, object],
    ) -> None:
        """Decide which steps; ``run_config`` goes into the manifests, ``model_folder`` has the tokenizer."""
        self.prompts_only = config.prompts_only or switches.prompts_only
        self.steps = CapturedSteps.of(config, switches, first_step=first_step)
        self._config = config
        self._plan = plan
        self._run_folder = run_folder
        self._run_config = run_config
        self._is_possible = True
        self._model_folder = model_folder
        self.comparisons = Comparisons(model_folder)

    def folder(self, step: int) -> Path:
        """Of a captured step; relative where the run folder was given so, for people to read."""
        return self._run_folder / "consistency" / f"step_{step}"

    @contextmanager
    def captured(self, group: WorkerGroup, step: int) -> Iterator[None]:
        """Around one training step: watch it where it is to be captured, then start the comparison; say what others found."""
        job = self._begin(group, step) if step in self.steps and self._is_possible else None
        yield
        if job is not None:
            group.watch(None)
            self.comparisons.start(job)
            if self.prompts_only:
                logger.info(
                    "consistency step %d: prompts only. The update saw prompts alone; its %d optimizer step(s) were skipped.",
                    step,
                    self._plan.optimizer_steps_per_step,
                )
        self.report()

    def compare_now(self, job: Job, seconds: float) -> StepVerdict | str:
        """Compare ahead of everything else, and wait; the verdict, or why there is none."""
        comparisons = Comparisons(self._model_folder)
        comparisons.start(job)
        ended = comparisons.wait(seconds)
        comparisons.close()
        if ended and ended[0].verdict is not None:
            return ended[0].verdict
        why = ended[0].problem if ended else f"the comparison takes more than {seconds:g} s"
        return f"The first module is not named: {why}. Try: {job.command(self._model_folder)}"

    def report(self) -> None:
        """Say what has been found since the last call."""
        for finished in self.comparisons.poll():
            self._tell(finished)

    def finish(self) -> None:
        """Wait for the comparisons that still run, and say what they found."""
        self.report()
        waiting = self.comparisons.unfinished
        if waiting:
            numbers = ", ".join(str(job.step) for job in waiting)
            logger.info("Waiting for the comparison of step%s %s.", "s" * (len(waiting) > 1), numbers)
        for finished in self.comparisons.wait(LAST_WAIT_SECONDS):
            self._tell(finished)
        for job in self.comparisons.unfinished:
            logger.warning(
                "consistency step %d: not compared within %d s. The dumps are whole: %s",
                job.step,
                LAST_WAIT_SECONDS,
                job.command(self._model_folder),
            )
        self.comparisons.close()

    def order(self, rollout: Path, train: Path, *, train_pass: str, task: str) -> CaptureOrder:
        """What ranks are told; dump paths become absolute, since ranks may work elsewhere."""
        return CaptureOrder(
            rollout_folder=rollout.absolute(),
            train_folder=train.absolute(),
            train_pass=train_pass,
            level=self._config.level,
            task=task,
            modules=self._config.modules,
            prompts_only=self.prompts_only and train_pass == "update",
            mini_batches_per_epoch=self._plan.mini_batches_per_epoch,
            max_bytes=self._bytes_per_dump(),
            config=self._run_config,
        )

    def _begin(self, group: WorkerGroup, step: int) -> Job | None:
        folder = self.folder(step)
        names = PROMPTS_ONLY_SIDES if self.prompts_only else SIDES
        try:
            make_room(folder)
            order = self.order(
                folder / names[0], folder / names[1], train_pass="update", task=self._config.task
            )
        except OSError as error:
            logger.warning(
                "Step %d is not captured: %s cannot be written (%s).", step, folder, error.strerror
            )
            return None
        if order.max_bytes is not None and order.max_bytes < LEAST_BYTES:
            logger.warning("Step %d is not captured: the disk of %s is full.", step, folder)
            return None
        reason = group.watch(order)
        if reason is not None:
            self._is_possible = False
            logger.warning(
                "No step is captured: %s (rollout.name=builtin, hf and vllm can be watched).", reason
            )
            return None
        return Job(step=step, rollout=folder / names[0], train=folder / names[1], out=folder)

    def _bytes_per_dump(self) -> int:
        """Of one side on one rank."""
        existing = next(
            path for path in (self._run_folder, *self._run_folder.absolute().parents) if path.is_dir()
        )
        limit = int(shutil.disk_usage(existing).free * SHARE_OF_FREE_DISK)
        if self._config.max_bytes is not None:
            limit = min(limit, self._config.max_bytes)
        return limit // (2 * self._plan.num_ranks)

    def _tell(self, finished: Finished) -> None:
        step, verdict = finished.job.step, finished.verdict
        if verdict is None:
            logger.warning(
                "consistency step %d: not compared (%s). Try: %s",
                step,
                finished.problem,
                finished.job.command(self._model_folder),
            )
        else:
            level = logging.INFO if verdict.is_good else logging.WARNING
            logger.log(level, "consistency step %d: %s", step, verdict.line())


def make_room(folder: Path) -> None:
    """Make a captured step's folder; a step that runs again, after a resume, replaces what its earlier run left there.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*SIDES, *PROMPTS_ONLY_SIDES, *VIOLATION):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
    for name in (RESULT, PAGE, LOG, *TABLES):
        (folder / name).unlink(missing_ok=True)
