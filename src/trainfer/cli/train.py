"""``trainfer train CONFIG.yaml [OVERRIDES…]``: load, plan, run, show.

Takes the command line; gives exit code 0 when the run ended. All mistakes of configuration and batch sizes
are reported before torch is loaded.
"""

from pathlib import Path

import click

from trainfer.config.document import help_key, help_text
from trainfer.config.load import load_config
from trainfer.plan.step import plan_step


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
    plan_step(loaded.config)
    return 0
