"""``trainfer compare``: do the rollout and the trainer agree?

Takes two dump folders; prints the verdict and writes the report where asked. Exit code 0: equal or within
rounding, 1: diverged, 2: could not be compared.
"""

from pathlib import Path

import click


@click.command("compare")
@click.argument("rollout", type=click.Path(path_type=Path))
@click.argument("train", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the model (config.json, *.safetensors): replays every module in float64; its tokenizer names the tokens.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for result.json, report.html, modules.csv and modules.xlsx.",
)
@click.option("--json", "as_json", is_flag=True, help="Print result.json instead of the summary.")
def command(*, rollout: Path, train: Path, model: Path | None, out: Path | None, as_json: bool) -> int:
    """Compare two dumps row by row: ROLLOUT against TRAIN."""
    from trainfer.integrations.dumps import compare

    result = compare(rollout, train, model=model)
    click.echo(result.json() if as_json else result.summary(), nl=not as_json)
    if out is not None:
        folder = result.write(out)
        click.echo(f"\nreport: {folder / 'report.html'}", err=True)
    return result.exit_code
