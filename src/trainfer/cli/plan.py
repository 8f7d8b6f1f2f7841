"""``trainfer plan [FILE.sh|FILE.yaml] [OVERRIDES…]``: what the sizes become, and what breaks.

Takes a launch script, a YAML file or overrides alone; gives exit code 0 when no problem is an
error, else 1. Loads no torch and runs nothing of what it reads.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from trainfer.errors import ConfigError
from trainfer.plan.analyse import analyse
from trainfer.plan.read import is_file, read_question
from trainfer.plan.records import Plan
from trainfer.plan.rule_sets import Rules
from trainfer.plan.to_json import plan_document


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FILE.sh|FILE.yaml] [OVERRIDES]...")
@click.option(
    "--rules",
    type=click.Choice(["verl-0.6", "verl-0.9", "trainfer"]),
    help="Whose rules to plan under. Default: the set that the input's keys fit.",
)
@click.option(
    "--env", "assignments", multiple=True, metavar="NAME=VALUE", help="A variable for a launch script."
)
@click.option("--heads", type=click.IntRange(min=1), help="Attention heads of the model.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Key-value heads of the model.")
@click.option(
    "--diff", "other", type=click.Path(path_type=Path), help="Show how another input differs in effect."
)
@click.option("--explain", "key", metavar="KEY", help="Say what a key counts, per what, and what divides it.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    words: Sequence[str],
    rules: Rules | None,
    assignments: Sequence[str],
    heads: int | None,
    kv_heads: int | None,
    other: Path | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Say what every batch size becomes, what breaks, when, and what to change.

    FILE is a launch script (read statically, never executed) or a YAML file with verl's key names.
    OVERRIDES have Hydra's grammar; for a script they are its "$@".
    """
    if key is not None:
        from trainfer.plan.explain import explain

        click.echo(explain(key))
        return
    path, overrides = split_words(words)
    variables = {**os.environ, **_variables(assignments)}
    plan = analyse(read_question(path, overrides, variables=variables, heads=heads, kv_heads=kv_heads), rules)
    if other is not None:
        second = analyse(read_question(other, (), variables=variables, heads=heads, kv_heads=kv_heads), rules)
        _show_difference(plan, second, as_json=as_json)
    elif as_json:
        click.echo(
            json.dumps(plan_document(plan), ensure_ascii=False, indent=1, allow_nan=False, default=str)
        )
    else:
        from trainfer.plan.show import show

        show(plan, title=str(path) if path is not None else "defaults and overrides")
    ctx.exit(0 if plan.ok else 1)


def split_words(words: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """The file, if the first word is one, and the overrides."""
    if not words:
        return None, ()
    first = words[0]
    if is_file(Path(first)) or ("=" not in first and not first.startswith("~")):
        return Path(first), words[1:]
    return None, words


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier() or "\0" in value:
            raise ConfigError(f"--env {assignment!r}: expected NAME=VALUE.")
        variables[name] = value
    return variables


def _show_difference(first: Plan, second: Plan, *, as_json: bool) -> None:
    from trainfer.plan.difference import difference, show_difference

    found = difference(first, second)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False, indent=1, allow_nan=False, default=str))
    else:
        show_difference(found)
