"""``trainfer train CONFIG.yaml [OVERRIDES…]``: load, plan, run, show.

Takes the command line; gives exit code 0 when the run ended. All mistakes of configuration and batch sizes
are reported before torch is loaded.
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainfer.cli.command_line import command_line as line_to_repeat
from trainfer.config.document import help_key, help_text
from trainfer.config.load import LoadedConfig, load_config
from trainfer.errors import TrainferError
from trainfer.plan.records import StepPlan
from trainfer.plan.step import plan_step
from trainfer.workers.launched import Launched, launched_by_torchrun

if TYPE_CHECKING:
    from rich.console import Console

    from trainfer.workers.inputs import Inputs


class ExplainedCommand(click.Command):
    """Adds every key of the configuration to ``--help``."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """All keys by section; full names are ``section.key``."""
        with formatter.section("Keys (SECTION.KEY=VALUE; --help-key shows one)"):
            formatter.write(help_text(width=formatter.width) + "\n")


def _show_key(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is None or ctx.resilient_parsing:
        return
    click.echo(help_key(value))
    ctx.exit()


@click.command("train", cls=ExplainedCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--help-key",
    metavar="KEY",
    is_eager=True,
    expose_value=False,
    callback=_show_key,
    help="Explain one key, or all keys of one section, and stop.",
)
def command(config: Path, overrides: tuple[str, ...]) -> int:
    """Train the model of CONFIG by GRPO, and measure at every step that rollout and training agree.

    OVERRIDES change single keys: KEY=VALUE, +KEY=VALUE, ~KEY (Hydra's grammar). The same command started again
    goes on from the newest checkpoint of the run folder.
    """
    loaded = load_config(config, overrides)
    plan = plan_step(loaded.config)
    launched = launched_by_torchrun()
    if launched is not None:
        launched.check(plan)
    if launched is not None and launched.rank > 0:
        serve_rank(loaded, plan, launched)
    else:
        run_and_show(loaded, command_line=line_to_repeat(["train", str(config), *overrides]))
    if launched is not None:
        # Threads of torch's gloo now and then abort a process that ends in the ordinary way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def serve_rank(loaded: LoadedConfig, plan: StepPlan, launched: Launched) -> None:
    """A rank that torchrun has started beside rank 0, which checks everything, drives the run and tells what is wrong."""
    from trainfer.workers.checks import check_honoured
    from trainfer.workers.inputs import choose_device
    from trainfer.workers.torchrun_group import serve

    try:
        check_honoured(loaded.config, plan)
        serve(launched, choose_device(loaded.config.trainer.device).type)
    except TrainferError:
        os._exit(TrainferError.exit_code)


def run_and_show(loaded: LoadedConfig, *, command_line: str) -> None:
    """Run every step that is left, with progress, and say at the end what was reached and what can be done."""
    from rich.console import Console

    from trainfer.check.report.training import write_training_report
    from trainfer.cli.progress import NextSteps, Progress, closing_summary
    from trainfer.run import run_steps
    from trainfer.workers.session import open_session

    console = Console()
    _log_to(console)
    with open_session(loaded, on_warmup=_Warmup(console, loaded)) as session:
        total = session.steps.stop - 1
        folder = session.journal.folder.path
        console.print(
            f"Run folder {folder}; steps {session.steps.start} to {total}.", highlight=False, soft_wrap=True
        )
        console.print(_data_line(session.inputs), highlight=False, soft_wrap=True)
        with Progress(total=total, first_step=session.steps.start, console=console) as progress:
            for report in run_steps(session, watcher=progress):
                progress.step(report)
    if loaded.config.trainer.val_only:
        return
    page = write_training_report(folder, None)
    tensorboard = "tensorboard" in loaded.config.trainer.logger
    ending = NextSteps(folder=folder, train_command=command_line, total=total, tensorboard=tensorboard)
    console.print(closing_summary(ending), highlight=False, soft_wrap=True, markup=False)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


def _data_line(inputs: "Inputs") -> str:
    """What was read, and what of it no step trains on."""
    left_out = inputs.order.rows_left_out_per_epoch
    return (
        f"Data: {inputs.training.summary()}; {inputs.order.steps_per_epoch} steps an epoch"
        + (f", the last {left_out} prompts of each epoch fill no step and are left out" if left_out else "")
        + (f". Validation: {inputs.validation.summary()}." if inputs.validation else ". No validation data.")
    )


class _Warmup:
    """Shows the warm-up that makes the demonstration's model: about ten lines."""

    def __init__(self, console: "Console", loaded: LoadedConfig) -> None:
        warmup = loaded.config.trainfer.warmup
        self._console = console
        self._steps = warmup.steps if warmup is not None else 0

    def __call__(self, step: int, loss: float) -> None:
        """``step`` counts from 1."""
        if step % max(1, self._steps // 10) == 0 or step == self._steps:
            self._console.print(f"warm-up {step}/{self._steps}  loss {loss:.3f}", highlight=False)


def _log_to(console: "Console") -> None:
    """What the stages have to say goes above the progress display."""
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    package = logging.getLogger("trainfer")
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False
