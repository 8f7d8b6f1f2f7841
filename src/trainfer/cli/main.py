"""The ``trainfer`` command: one verb a module, loaded only when it is used.

Takes the command line; gives the exit code: 0 good, 1 a finding, 2 could not do it, 130 interrupted. This is
the one place where a ``TrainferError`` becomes ``error: message``; any other exception is a mistake of ours
and shows its traceback. Nothing here loads torch.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from trainfer.cli.command_line import command_line
from trainfer.errors import TrainferError


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """Where a verb lives, and its line in ``trainfer --help``."""

    module: str
    """Has a click command named ``command``."""
    summary: str


VERBS: Mapping[str, Verb] = {
    "plan": Verb(module="trainfer.cli.plan", summary="Say what the batch sizes become and what breaks."),
    "train": Verb(module="trainfer.cli.train", summary="Train by GRPO: CONFIG.yaml [OVERRIDES…]."),
    "eval": Verb(module="trainfer.cli.eval", summary="Score the validation set: CONFIG.yaml [OVERRIDES…]."),
    "generate": Verb(module="trainfer.cli.generate", summary="Sample responses to prompts of your own."),
    "export": Verb(module="trainfer.cli.export", summary="Write a checkpoint as a Hugging Face folder."),
    "report": Verb(module="trainfer.cli.report", summary="Write report.html of a run folder."),
    "compare": Verb(
        module="trainfer.cli.compare", summary="Compare two dumps row by row: ROLLOUT_DUMP TRAIN_DUMP."
    ),
    "inspect": Verb(
        module="trainfer.cli.inspect", summary="Say what is in a dump, and what is damaged: DUMP."
    ),
    "faults": Verb(
        module="trainfer.cli.faults", summary="Plant faults in tiny models and score what a comparison says."
    ),
    "attach": Verb(
        module="trainfer.cli.attach", summary="Run a stock verl command with the probe in it: -- COMMAND…."
    ),
    "doctor": Verb(module="trainfer.cli.doctor", summary="Say what is installed and what will work."),
}
"""A verb is added by one line here and one module with ``command``."""


class Verbs(click.Group):
    """Looks verbs up in ``VERBS`` and imports a module only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a verb and give it ``--debug``."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command = importlib.import_module(verb.module).command
        assert isinstance(command, click.Command), f"{verb.module} has no command"
        if all(parameter.name != "debug" for parameter in command.params):
            command.params.append(_debug_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The verbs and their summaries, from the table alone."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        help="Show the traceback of an error.",
    )


@click.group(
    cls=Verbs,
    epilog="`trainfer VERB --help` says more. Errors end with exit code 2 and one message.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="trainfer", message="%(version)s")
def group() -> None:
    """GRPO post-training in which the policy that samples is the policy that trains."""


group.params.append(_debug_option())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and give its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = group.main(args=words, prog_name="trainfer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo(f"\ninterrupted. {_how_to_go_on(words)}", err=True)
        return 130
    except TrainferError as error:
        if "--debug" in words:
            traceback.print_exc()
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    return code if isinstance(code, int) else 0


def _how_to_go_on(words: Sequence[str]) -> str:
    if "train" not in words[:2]:
        return f"To start again:\n  {command_line(words)}"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # what torchrun was started with is known to torchrun alone
        return f"The same torchrun command goes on from the newest checkpoint; on each rank it starts:\n  {command_line(words)}"
    return f"The same command goes on from the newest checkpoint:\n  {command_line(words)}"


if __name__ == "__main__":
    sys.exit(main())
