"""How two inputs differ in effect: numbers first, then problems, then the values behind them."""

from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainfer.plan.records import Plan
from trainfer.plan.to_json import derived_document

SCHEMA = "trainfer.plan.diff/1"


def difference(first: Plan, second: Plan) -> dict[str, object]:
    """What differs, as plain data: ``[first, second]`` for each name."""
    return {
        "schema": SCHEMA,
        "rules": [first.rules, second.rules],
        "ok": [first.ok, second.ok],
        "derived": _changed(derived_document(first.derived), derived_document(second.derived)),
        "problems": _changed(
            {problem.code: problem.message for problem in first.problems},
            {problem.code: problem.message for problem in second.problems},
        ),
        "values": _changed(
            {key: row.value for key, row in first.values.items()},
            {key: row.value for key, row in second.values.items()},
        ),
    }


def _changed(first: dict[str, object], second: dict[str, object]) -> dict[str, list[object]]:
    names = list(dict.fromkeys([*first, *second]))
    return {
        name: [first.get(name), second.get(name)] for name in names if first.get(name) != second.get(name)
    }


def show_difference(found: dict[str, object], *, console: Console | None = None) -> None:
    """Print the difference; says so when there is none."""
    out = console or Console()
    if console is None and not out.is_terminal:
        out = Console(width=max(110, out.width))
    empty = True
    for part in ("derived", "problems", "values"):
        rows = cast("dict[str, list[object]]", found[part])
        if not rows:
            continue
        empty = False
        table = Table(title=part, title_justify="left", box=None, header_style="bold")
        for name in ("name", "first", "second"):
            table.add_column(name, overflow="fold")
        for name, (one, other) in rows.items():
            table.add_row(name, Text(_text(one)), Text(_text(other)))
        out.print(table)
    if empty:
        out.print("no difference in effect")


def _text(value: object) -> str:
    if isinstance(value, dict):
        span = cast("dict[str, int]", value)
        return f"{span.get('min')} to {span.get('max')}"
    return "–" if value is None else str(value)
