"""``trainfer faults``: how often does a comparison name the right module and cause?

Takes seeds; plants faults in tiny models, compares, and prints a scored table. Exit code 0: all targets reached, 1: a target
missed.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from trainfer.faults.generators import Generator
    from trainfer.faults.records import Scores
    from trainfer.faults.tally import Line


_FILE_WIDTH = 110
"""Columns where the output is no terminal."""


@click.command("faults")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Cases per fault.")
@click.option("--only", default=None, help="A family, a cause, a fault's name, or 'controls'.")
@click.option(
    "--generator",
    type=click.Choice(["first", "second", "both", "third"]),
    default="first",
    show_default=True,
    help="Whose faults and controls; the second and third were written without sight of the rules.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Keep the dumps and reports of failures in this folder.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=None,
    help="Processes; without it one for each usable core, at most 4 and no more than there are seeds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every case and score as JSON.")
@click.option("--markdown", is_flag=True, help="Print the tables of docs/faults.md.")
@click.option("--list", "list_only", is_flag=True, help="Print what is planted and end.")
def command(
    *,
    seeds: int,
    only: str | None,
    generator: str,
    out: Path | None,
    workers: int | None,
    as_json: bool,
    markdown: bool,
    list_only: bool,
) -> int:
    """Plant faults in tiny models, compare both sides, and score what the comparison says."""
    from rich.console import Console

    from trainfer.faults import show
    from trainfer.faults.generators import Generator
    from trainfer.faults.tally import tally

    whose = Generator(generator)
    if list_only:
        click.echo(show.fault_list(whose), nl=False)
        return 0
    scores = _run(seeds, only, whose, out, workers or _default_workers(seeds), Console(stderr=True))
    result = tally(scores)
    if as_json:
        click.echo(show.as_json(scores))
    elif markdown:
        click.echo(show.markdown(scores), nl=False)
    else:
        console = Console()
        _print(scores, console if console.is_terminal else Console(width=_FILE_WIDTH))
    return 1 if result.missed else 0


def _default_workers(seeds: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, 4, seeds))


def _run(
    seeds: int, only: str | None, generator: "Generator", out: Path | None, workers: int, console: "Console"
) -> "Scores":
    """Run the suite with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from trainfer.faults.suite import one_thread, run_suite

    one_thread()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        return run_suite(seeds, only=only, generator=generator, out=out, workers=workers, progress=show)


def _print(scores: "Scores", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    from trainfer.faults import show
    from trainfer.faults.suite import failures
    from trainfer.faults.tally import tally

    result = tally(scores)

    def table(first: str, lines: "tuple[Line, ...]") -> Table:
        made = Table(box=box.SIMPLE_HEAD)
        made.add_column(first, no_wrap=True)
        for heading in show.HEADINGS:
            made.add_column(heading, justify="right", no_wrap=True)
        for line in lines:
            made.add_row(line.name, *show.cells(line))
        return made

    if result.causes:
        console.print(table("cause", (*result.causes, result.total)))
    if result.bands:
        console.print(table("effect over noise", result.bands))
    for outcome in failures(scores):
        click.echo(f"failed  {show.failure_line(outcome)}")
    for control in scores.controls:
        if control.alarm:
            click.echo(f"alarm   {control.name}, seed {control.seed}: {control.alarm}")
    click.echo(f"\n{show.sentence(scores, result)}")
    for missed in result.missed:
        click.echo(f"target missed: {missed}")
