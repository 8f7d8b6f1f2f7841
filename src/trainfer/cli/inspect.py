"""``trainfer inspect DUMP``: what is in a dump, how whole it is, what is damaged. Loads no torch.

Exit code 0: whole; 1: incomplete or damaged, and the rest can be read; 2: no dump.
"""

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from trainfer.check.dump.reader import Dump
from trainfer.check.dump.summary import DumpSummary, PassSummary, summarise


@click.command("inspect")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--quick", is_flag=True, help="Look at sizes only; do not read every tensor to verify its checksum."
)
def command(dump: Path, *, as_json: bool, quick: bool) -> int:
    """Show steps, passes, rows, sizes, completeness and damaged records of DUMP."""
    summary = summarise(Dump(dump), verify=not quick)
    if as_json:
        click.echo(json.dumps(_as_json(summary), ensure_ascii=False, indent=1))
    else:
        _show(summary, Console(soft_wrap=True))
    return 0 if summary.is_whole else 1


def _as_json(summary: DumpSummary) -> dict[str, object]:
    answer = {"dump_schema": summary.schema, **asdict(summary)}
    del answer["schema"]
    answer["passes"] = [_pass_json(each) for each in summary.passes]
    return {"schema": "trainfer.inspect/1", "ok": summary.is_whole, **answer}


def _pass_json(each: PassSummary) -> dict[str, object]:
    return {**asdict(each), "weights_versions": sorted(each.weights_versions)}


def _show(summary: DumpSummary, console: Console) -> None:
    state = "complete" if summary.complete else "INCOMPLETE"
    console.print(
        f"[bold]{summary.side}[/] · {state} · {summary.model_class} {summary.model_dtype} · run {summary.run_id}"
    )
    console.print(
        f"{summary.level} {summary.task} · {summary.records:,} records of {summary.modules_captured} of "
        f"{summary.modules} modules · {summary.sequences:,} sequences · created {summary.created}, "
        f"finished {summary.finished or 'never'}"
    )
    weights = ", ".join(
        f"version {version}: {count:,} tensors" for version, count in sorted(summary.weights.items())
    )
    console.print(f"weights: {weights or 'none'}")
    table = Table(box=None)
    for name in (
        "rank",
        "step",
        "pass",
        "calls",
        "records",
        "rows",
        "padding",
        "discarded",
        "unknown",
        "MB",
        "weights",
    ):
        table.add_column(name, no_wrap=True, justify="left" if name == "pass" else "right")
    for each in summary.passes:
        table.add_row(
            str(each.rank),
            str(each.step),
            each.pass_name,
            f"{each.calls:,}",
            f"{each.records:,}",
            f"{each.rows:,}",
            f"{each.padding:,}",
            f"{each.discarded:,}",
            f"{each.unknown_rows:,}",
            f"{each.nbytes / 1e6:,.1f}",
            ", ".join(map(str, sorted(each.weights_versions))),
        )
    console.print(table)
    for reason in summary.incomplete_reasons:
        console.print(f"incomplete: {reason}", markup=False)
    for problem in summary.problems:
        console.print(f"problem: {problem}", markup=False)
    for damaged in summary.damaged:
        console.print(f"damaged: {damaged}", markup=False)
    looked = "every tensor was read" if summary.verified else "only sizes were looked at"
    console.print(f"{summary.damaged_records:,} damaged records ({looked})")
