"""``trainfer attach [OPTIONS] -- COMMAND…``: run a stock verl command with the probe in all its processes.

Takes the command that starts the run; gives its exit code, or that of the comparison where the run itself went well: 0 equal or
rounding, 1 diverged, 2 nothing could be compared.
"""

import datetime
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import click

from trainfer.errors import CaptureError

GIB = 2**30
_DEFAULT_BYTES = 4 * GIB
_UNITS = {"k": 2**10, "m": 2**20, "g": GIB, "t": 2**40}


@click.command("attach", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--steps",
    default="0,1",
    show_default=True,
    help="Steps to capture, counted from 0 in this run, or 'all'.",
)
@click.option(
    "--passes", default=None, help="Training passes: old_log_prob, ref_log_prob, update (default: all)."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="New folder for dumps and reports."
)
@click.option(
    "--prompts-only",
    is_flag=True,
    help="msProbe's recipe: train on prompts alone in these steps, and learn nothing.",
)
@click.option(
    "--task",
    type=click.Choice(["tensor", "statistics", "sketch"]),
    default="tensor",
    show_default=True,
    help="What is kept of each tensor.",
)
@click.option(
    "--max-bytes", default=None, help="Bound of one process, step and pass, e.g. 512M. Default: 4G."
)
@click.option("--python", default=None, help="The Python that COMMAND runs, where it cannot be told.")
@click.option("--dry-run", is_flag=True, help="Say what would be hooked, and stop.")
def command(
    *,
    words: Sequence[str],
    steps: str,
    passes: str | None,
    out: Path | None,
    prompts_only: bool,
    task: str,
    max_bytes: str | None,
    python: str | None,
    dry_run: bool,
) -> int:
    """Attach to a stock verl run, compare rollout and training, and say where they part.

    Example: trainfer attach -- python3 -m verl.trainer.main_ppo data.train_batch_size=64 ...
    """
    from trainfer.cli.attach_verdict import announce, check_plan, conclude
    from trainfer.integrations.verl import launch
    from trainfer.integrations.verl.settings import AttachSettings

    if not words:
        raise CaptureError(
            "trainfer attach got no command: trainfer attach -- python3 -m verl.trainer.main_ppo KEY=VALUE ..."
        )
    prompts_only = prompts_only or _asked_by_environment()
    run_id = f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    chosen_steps, chosen_passes = parse_steps(steps), parse_passes(passes, prompts_only=prompts_only)
    bound = _DEFAULT_BYTES if max_bytes is None else parse_bytes(max_bytes)
    folder = new_folder(out or Path("trainfer-attach") / run_id)
    installed = launch.ask(python or launch.find_python(words))
    table = launch.known_table(installed)
    plan = check_plan(words, table.version, prompts_only=prompts_only)
    settings = AttachSettings(
        out=str(folder),
        verl=table.version,
        run_id=run_id,
        steps=chosen_steps,
        passes=chosen_passes,
        prompts_only=prompts_only,
        task=task,
        max_bytes=bound,
    )
    announce(settings, table, installed, plan)
    if dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    added = launch.environment(settings, table, installed)
    code = launch.run([*words, *launch.ray_overrides(words, added)], added)
    return conclude(settings, code)


def parse_steps(text: str) -> tuple[int, ...] | None:
    """``0,1`` -> (0, 1); ``all`` -> None.

    Raises:
        CaptureError: it is neither.
    """
    if text.strip() == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise CaptureError(f"--steps {text!r}: give numbers from 0 on, separated by commas, or 'all'")
    return tuple(sorted({int(part) for part in parts}))


def parse_passes(text: str | None, *, prompts_only: bool) -> tuple[str, ...]:
    """Names of training passes, checked.

    Raises:
        CaptureError: one is not known, or makes no sense with prompts alone.
    """
    from trainfer.integrations.verl.settings import PASSES

    if text is None:
        return ("update",) if prompts_only else PASSES
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [part for part in chosen if part not in PASSES]
    if unknown:
        raise CaptureError(f"--passes {unknown[0]!r} is no pass; known are {', '.join(PASSES)}")
    if prompts_only and chosen != ("update",):
        raise CaptureError(
            f"--passes {text} with --prompts-only: the recipe cuts the responses of the update alone; leave --passes out"
        )
    return chosen


def parse_bytes(text: str) -> int:
    """``512M`` -> 536870912.

    Raises:
        CaptureError: it is no positive size.
    """
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    factor = _UNITS.get(number[-1:], 1)
    digits = number[:-1] if number[-1:] in _UNITS else number
    if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
        raise CaptureError(
            f"--max-bytes {text!r}: give a number of bytes above 0, with K, M, G or T after it if you like"
        )
    return int(digits) * factor


def new_folder(folder: Path) -> Path:
    """The folder's absolute path.

    Raises:
        CaptureError: it holds something, or nothing can be written there.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"--out {folder} is not empty; every attached run has a folder of its own")
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise CaptureError(f"--out {folder}: {nearest} cannot be written")
    return folder


def _asked_by_environment() -> bool:
    """The recipe's own switch; its other one, ``DUMP_ON``, turns capturing on, which is what ``attach`` does anyway."""
    return os.environ.get("PROMPTS_ONLY", "").strip().lower() in ("1", "true")
