"""``trainfer report RUN [--out FILE]``: the page of a run, made again from its folder. Loads no torch."""

from pathlib import Path

import click

from trainfer.check.report.training import write_training_report


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the page goes. Default: RUN/report.html.")
def command(run: Path, *, out: Path | None) -> None:
    """Write one HTML file: score and |Δlogp| curves, samples, where the time goes.

    RUN is the folder that `trainfer train` named, finished or not. The page is self-contained.
    """
    path = write_training_report(run, out)
    click.echo(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
