"""What a person sees while a run trains, and at its end.

Takes step reports (step, total, metrics), the stage under way and tokens as they are sampled; gives a live
display on a terminal and one line a step elsewhere (files, CI). ``closing_summary`` reads metrics.jsonl and
says what was reached and what to do next. Decides nothing about the run.
"""

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainfer.check.report.captured import read_verdicts
from trainfer.train.journal.checkpoints import list_checkpoints
from trainfer.train.journal.digest import BITWISE, DIFF_MAX, SCORE, STEP_SECONDS, RunDigest, digest
from trainfer.train.journal.metrics import read_metrics

_RECENT_STEPS = 20
"""Time left is reckoned from this many steps."""
_WORTH_SAYING = 0.01
"""Share of near misses among the responses above which the closing summary speaks of them."""
_SHOWN_VERDICTS = 6
_STAGE_NAMES = {
    "gen": "sampling",
    "reward": "scoring",
    "old_log_prob": "log-probs of the actor",
    "ref": "log-probs of the reference",
    "adv": "advantages",
    "update_actor": "updating",
    "update_weights": "handing the weights over",
    "save_checkpoint": "saving a checkpoint",
    "testing": "validating",
}


class Report(Protocol):
    """The part of a step report that is shown."""

    @property
    def step(self) -> int:
        """From 1."""
        ...

    @property
    def total(self) -> int:
        """The step at which the run ends."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Under verl's names."""
        ...


class Progress:
    """A context manager; every method may be called at any time between entering and leaving it."""

    def __init__(
        self, *, total: int, first_step: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``first_step`` is the first one that will be trained: above 1 after a resume."""
        self._total = total
        self._done = first_step - 1
        self._console = console
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._metrics: Mapping[str, float] = {}
        self._stage = "starting"
        self._stage_since = self._step_since = clock()
        self._tokens = 0
        self._live = (
            Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            if self._metrics:  # the display is gone: the last step stays
                self._console.print(self.line(), highlight=False, soft_wrap=True, markup=False)

    def stage(self, name: str) -> None:
        """The stage that begins now, under verl's ``timing_s`` name."""
        self._stage = _STAGE_NAMES.get(name, name)
        self._stage_since = self._clock()

    def tokens(self, count: int) -> None:
        """So many more tokens were sampled."""
        self._tokens += count

    def step(self, report: Report) -> None:
        """A step is done."""
        now = self._clock()
        self._seconds.append(report.metrics.get(STEP_SECONDS, now - self._step_since))
        self._step_since, self._tokens = now, 0
        self._done, self._total, self._metrics = report.step, report.total, report.metrics
        if self._live is None:
            self._console.print(self.line(), highlight=False, soft_wrap=True, markup=False)

    def line(self) -> str:
        """The last step in one line of plain text."""
        width = len(str(self._total))
        parts = [f"step {self._done:>{width}}/{self._total}", *(f"{n} {v}" for n, v in self._facts())]
        return "  ".join(parts)

    def _facts(self) -> list[tuple[str, str]]:
        facts: list[tuple[str, str]] = []
        if SCORE in self._metrics:
            facts.append(("reward", f"{self._metrics[SCORE]:.3f}"))
        if DIFF_MAX in self._metrics:
            facts.append(("|Δlogp| max", difference_text(self._metrics[DIFF_MAX])))
        if BITWISE in self._metrics:
            facts.append(("bitwise", percent_text(self._metrics[BITWISE])))
        seconds = self._seconds[-1] if self._seconds else 0.0
        tokens = self._metrics.get("perf/total_num_tokens", 0.0)
        if seconds > 0 and tokens > 0:
            facts.append(("tok/s", f"{tokens / seconds:,.0f}"))
        if seconds > 0:
            facts.append(("s/step", f"{seconds:.2f}"))
        if self._seconds:
            facts.append(("left", duration_text(self._seconds_left())))
        return facts

    def _seconds_left(self) -> float:
        return (self._total - self._done) * sum(self._seconds) / len(self._seconds)

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text("training", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=36),
            Text(f"{self._done}/{self._total}"),
        )
        facts = Text()
        for name, value in self._facts():
            facts.append(f"{name} ", style="dim")
            facts.append(f"{value}   ", style=_style(name, self._metrics))
        since = duration_text(self._clock() - self._stage_since)
        now = Text(f"step {min(self._done + 1, self._total)}: {self._stage} for {since}", style="dim")
        if self._tokens:
            now.append(f", {self._tokens:,} tokens sampled")
        return Group(head, facts, now) if self._metrics else Group(head, now)


def _style(name: str, metrics: Mapping[str, float]) -> str:
    """Green only where agreement is exact: nothing else is proven by a colour."""
    if name == "|Δlogp| max":
        value = metrics[DIFF_MAX]
        return "green" if value == 0 else "red" if not value < 1 else ""
    return ""


def difference_text(value: float) -> str:
    """A log-prob difference: ``0`` only when it is exactly zero."""
    return "0" if value == 0 else f"{value:.1e}"


def percent_text(fraction: float) -> str:
    """``100 %`` only when it is exactly all."""
    if fraction == 1:
        return "100 %"
    return f"{min(fraction * 100, 99.99):.2f} %" if math.isfinite(fraction) else "unknown"


def duration_text(seconds: float) -> str:
    """E.g. ``8 s``, ``3 min 07 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "unknown"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSteps:
    """What the closing lines may point to."""

    folder: Path
    train_command: str
    """The command line that was given, e.g. ``trainfer train tiny.yaml``: starting it again resumes. What
    stands before ``train`` (``python -m trainfer.cli.main``) starts the other verbs as well."""
    total: int
    """The step at which the run ends."""
    tensorboard: bool


def closing_summary(run: NextSteps) -> str:
    """What the run reached and what can be done with it; read from its folder."""
    path = run.folder / "metrics.jsonl"
    reached = digest(read_metrics(path)) if path.is_file() else None
    checkpoints = list_checkpoints(run.folder / "checkpoints")
    if reached is None:
        return f"No step was finished. {run.folder} holds the configuration; start again: {run.train_command}"
    ended = (
        "Done" if reached.last_step >= run.total else f"Stopped after step {reached.last_step} of {run.total}"
    )
    lines = [
        f"{ended}: {reached.num_steps} steps in {duration_text(reached.seconds)}.",
        *_reached_lines(reached),
    ]
    lines += _captured_lines(run.folder)
    lines.append(f"  checkpoint   {checkpoints[-1][1] if checkpoints else 'none (trainer.save_freq)'}")
    commands = _commands(run, finished=reached.last_step >= run.total, has_checkpoint=bool(checkpoints))
    lines.append("Next:")
    for command, purpose in commands:
        lines += [f"  # {purpose}", f"  {command}"]
    return "\n".join(lines)


def _reached_lines(reached: RunDigest) -> list[str]:
    lines = []
    if reached.first_score is not None and reached.last_score is not None:
        lines.append(
            f"  score        {reached.first_score:.3f} (first quarter) -> {reached.last_score:.3f} (last quarter)"
        )
    if reached.near_misses > _WORTH_SAYING * reached.num_responses:
        lines.append(
            f"  near misses  {reached.near_misses:,} responses held the right answer in a form that scores 0: "
            "say in the prompt how to write it"
        )
    if reached.diff_max is not None:
        exact = (
            ""
            if reached.bitwise_fraction is None
            else f", {percent_text(reached.bitwise_fraction)} bitwise equal"
        )
        lines.append(
            f"  |Δlogp| max  {difference_text(reached.diff_max)} over {reached.compared_tokens:,} sampled tokens{exact}"
        )
    if reached.checked_syncs:
        lines.append(
            f"  weights      proven equal after {reached.proven_syncs:,} of {reached.checked_syncs:,} hand-overs"
        )
    return lines


def _captured_lines(folder: Path) -> list[str]:
    """Captured steps whose two sides were compared: verdicts, and the report of the first that is not good."""
    verdicts = read_verdicts(folder)
    if not verdicts:
        return []
    shown = ", ".join(f"step {item.step} {item.verdict}" for item in verdicts[:_SHOWN_VERDICTS])
    more = len(verdicts) - _SHOWN_VERDICTS
    page = next((item for item in verdicts if not item.is_good), verdicts[-1]).page
    return [f"  consistency  {shown}{f' and {more} more' if more > 0 else ''}: {page}"]


def _commands(run: NextSteps, *, finished: bool, has_checkpoint: bool) -> list[tuple[str, str]]:
    folder = shlex.quote(str(run.folder))
    words = shlex.split(run.train_command)
    verb = words.index("train")
    program, arguments = shlex.join(words[:verb]), words[verb + 1 :]
    commands = [(f"{program} report {folder}", "curves and samples in one HTML file")]
    if has_checkpoint:
        # With the overrides: they may name another run folder or another validation set than the file does.
        commands.append((f"{program} eval {shlex.join(arguments)}", "score the validation set"))
        commands.append(
            (f"{program} export {folder} {folder}/exported", "a folder for Transformers and vLLM")
        )
    if run.tensorboard:
        commands.append((f"tensorboard --logdir {folder}/tensorboard", "every metric"))
    if finished:
        commands.append((_longer(run.train_command, 2 * run.total), "train on"))
    else:
        commands.append((run.train_command, "resume from the newest checkpoint"))
    return commands


def _longer(train_command: str, total: int) -> str:
    """The same command with another number of steps."""
    key = "trainer.total_training_steps="
    words = [word for word in shlex.split(train_command) if not word.lstrip("+").startswith(key)]
    return shlex.join([*words, f"{key}{total}"])
