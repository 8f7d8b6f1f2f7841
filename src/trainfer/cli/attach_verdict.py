"""What ``trainfer attach`` says before a run and after it: what is hooked, how much disk it may take; then the verdicts.

Takes settings and the folder that the run filled; prints, and gives an exit code.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from trainfer.errors import CaptureError, TrainferError
from trainfer.integrations.verl.journal import Line, read_journals
from trainfer.integrations.verl.launch import Installed
from trainfer.integrations.verl.points import Table
from trainfer.integrations.verl.settings import AttachSettings
from trainfer.plan.analyse import analyse
from trainfer.plan.read import read_question
from trainfer.plan.records import Plan

_GIB = 2**30
_MAX_LINES = 12
_MISSING = "???"
"""verl's mark of a key that must be set; verl itself says so."""


def check_plan(words: Sequence[str], version: str, *, prompts_only: bool) -> Plan | None:
    """The plan of what the command trains; None where its keys cannot be read.

    Raises:
        CaptureError: an engine or a backend that is not attached to; with ``prompts_only``, a condition of the recipe that
            does not hold.
    """
    script, overrides = _script_and_overrides(words)
    rules = "verl-0.6" if version.startswith("0.6") else "verl-0.9"
    try:
        plan = analyse(
            read_question(script, overrides, variables=dict(os.environ)), rules, with_suggestions=False
        )
    except TrainferError as error:
        if prompts_only:
            raise CaptureError(
                f"--prompts-only needs the batch sizes of the run, and they cannot be read from the command: {error}"
            ) from error
        return None
    _refuse_others(plan)
    if prompts_only:
        _check_recipe(plan)
    return plan


def _script_and_overrides(words: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    for place, word in enumerate(words):
        if word.startswith("verl.trainer") or word.endswith("main_ppo.py"):
            return None, [w for w in words[place + 1 :] if "=" in w or w.startswith("~")]
        if word.endswith(".sh") and Path(word).is_file():
            return Path(word), words[place + 1 :]
    return None, [word for word in words if "=" in word and not word.startswith("-")]


def _refuse_others(plan: Plan) -> None:
    """Only what is attached to may pass; SGLang and Megatron are not."""
    for key, allowed in (
        ("actor_rollout_ref.rollout.name", ("vllm",)),
        ("actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2")),
    ):
        row = plan.values.get(key)
        if row is None or row.unknown is not None or row.value == _MISSING:
            continue
        if row.value not in allowed:
            raise CaptureError(
                f"{key}={row.value} ({row.source}): trainfer attach knows {' and '.join(allowed)} there, and nothing else"
            )


def _check_recipe(plan: Plan) -> None:
    """The recipe's checklist; ``balance_batch`` and the environment are no conditions here: rows are joined by their tokens."""
    free = ("balance", "environment", "PROMPTS_ONLY", "DUMP_ON", "TORCHDYNAMO")
    failed = [
        condition
        for condition in plan.alignment.conditions
        if not condition.ok and not any(word in f"{condition.name} {condition.keys}" for word in free)
    ]
    if failed:
        lines = [f"{c.name} is {c.value}, required {c.required} ({', '.join(c.keys)})" for c in failed]
        raise CaptureError(
            "--prompts-only: the recipe's conditions do not hold:\n  "
            + "\n  ".join(lines)
            + "\nChange these keys, or leave --prompts-only out: trainfer needs none of them"
        )


def announce(settings: AttachSettings, table: Table, installed: Installed, plan: Plan | None) -> None:
    """Say what will be hooked and what it may cost."""
    steps = "all steps" if settings.steps is None else f"steps {', '.join(map(str, settings.steps))}"
    click.echo(f"trainfer attach: verl {installed.verl}, vLLM {installed.vllm} in {installed.python}")
    click.echo(f"  captures {steps}, counted from 0: rollout, {', '.join(settings.passes)} ({settings.task})")
    for point in table.points:
        click.echo(f"  hooks {point.module}.{point.name}: {point.what}")
    click.echo(f"  {disk_bound(settings, plan)}")
    if settings.prompts_only:
        click.echo("  prompts only: in these steps responses are cut off and the optimizer step is SKIPPED")
    click.echo(f"  writes below {settings.out}")


def disk_bound(settings: AttachSettings, plan: Plan | None) -> str:
    """How much may be written at most."""
    assert settings.max_bytes is not None
    each = settings.max_bytes / _GIB
    ranks = plan.derived.num_gpus if plan is not None else None
    parts = len(settings.passes) + 1
    text = f"disk: at most {each:.3g} GiB of values for each rank, step and pass"
    if settings.steps is None or not isinstance(ranks, int):
        return f"{text}, {parts} passes with the rollout (--max-bytes sets it)"
    total = each * ranks * parts * len(settings.steps)
    return (
        f"{text}: {ranks} ranks x {len(settings.steps)} steps x {parts} passes with the rollout = {total:.3g} GiB "
        "(--max-bytes sets it)"
    )


def conclude(settings: AttachSettings, code: int) -> int:
    """Compare what was captured, print the verdicts, and give the exit code: the run's, or the worst verdict's."""
    from trainfer.integrations.attached import judge, step_passes, sync_proofs

    folder = settings.folder
    click.echo(f"\ntrainfer attach: the command ended with exit code {code}")
    _tell_problems(read_journals(folder))
    broken = 0
    for proof in sync_proofs(folder):
        broken += not proof.holds
        state = "are the trainer's" if proof.holds else f"DIFFER in {_some(proof.differing)}"
        click.echo(
            f"  weights after sync {proof.version}, {proof.rollout}: {proof.compared} parameters {state}"
        )
    codes = [1] if broken else []
    pairs = step_passes(folder)
    for pair in pairs:
        try:
            result = judge(pair, None)
        except TrainferError as error:
            click.echo(f"  step {pair.step}, {pair.pass_name}: not compared: {error}", err=True)
            codes.append(2)
            continue
        codes.append(result.exit_code)
        click.echo(f"\n== step {pair.step}, rollout against {pair.pass_name} ({pair.report / 'report.html'})")
        click.echo(result.summary(), nl=False)
    if not pairs:
        click.echo(_nothing(settings), err=True)
        codes.append(2)
    verdict = 1 if 1 in codes else max(codes, default=2)
    return code if code else verdict


def _tell_problems(lines: Sequence[Line]) -> None:
    told = list(dict.fromkeys(line.text for line in lines if line.kind in ("problem", "missing", "note")))
    for text in told[:_MAX_LINES]:
        click.echo(f"  {text}")
    if len(told) > _MAX_LINES:
        click.echo(f"  and {len(told) - _MAX_LINES} more in processes/*.jsonl")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _nothing(settings: AttachSettings) -> str:
    hooked = len({line.text for line in read_journals(settings.folder) if line.kind == "hooked"})
    if not hooked:
        return (
            f"nothing was captured: no process of the run hooked anything. Does the run's Python see trainfer, and do its "
            f"processes inherit the environment? A Ray cluster that ran before does not (see docs/verl.md). {settings.out}"
        )
    return (
        f"nothing to compare: {hooked} functions were hooked, but no captured step has both a rollout and a training pass. "
        f"--steps {shlex.quote(str(settings.steps))} counts from 0 in this run"
    )
