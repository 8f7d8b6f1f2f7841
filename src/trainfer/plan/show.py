"""A plan for people: verdict, picture, problems with remedies, tensor shapes, values with sources."""

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainfer.plan.asked import shown
from trainfer.plan.picture import picture
from trainfer.plan.records import Plan, Problem, Value

_WHEN = {
    "config": "at its configuration check",
    "init": "while its workers are built",
    "run": "in the first step",
    "silent": "never: it runs on in silence",
}


def show(plan: Plan, *, title: str, console: Console | None = None) -> None:
    """Print a plan; without a terminal at least 110 columns, no colours."""
    out = console or Console()
    if console is None and not out.is_terminal:
        out = Console(width=max(110, out.width))
    errors = sum(problem.severity == "error" for problem in plan.problems)
    warnings = len(plan.problems) - errors
    verdict = "legal" if plan.ok else f"{errors} error{'s' if errors != 1 else ''}"
    style = "bold green" if plan.ok else "bold red"
    out.print(
        Text.assemble((title, "bold"), "  ", (verdict, style), f", {warnings} warnings" if warnings else "")
    )
    out.print(Text(f"rules: {plan.rules} ({plan.system}); {plan.reason}", style="dim"))
    out.print()
    out.print(Text(picture(plan)))
    out.print()
    for problem in plan.problems:
        out.print(_problem(problem))
    remedies = {overrides(changes): None for problem in plan.problems for changes in problem.suggestions}
    for number, text in enumerate(remedies):
        out.print(Text.assemble(("cures all  " if not number else "or         ", "bold green"), text))
    if remedies:
        out.print()
    for note in plan.notes:
        out.print(Text.assemble(("note  ", "cyan"), note))
    if plan.notes:
        out.print()
    out.print(_tensors(plan))
    if plan.memory is not None:
        out.print(_memory(plan))
    out.print(_alignment(plan))
    out.print(_values(plan))


def overrides(changes: Mapping[str, Value]) -> str:
    """Overrides as they are typed."""
    return " ".join(f"{key}={shown(value)}" for key, value in changes.items())


def _problem(problem: Problem) -> RenderableType:
    lines: list[RenderableType] = [Text(problem.message)]
    if problem.upstream_message is not None:
        lines.append(Text(f"verl prints: {problem.upstream_message}", style="dim"))
    colour = "red" if problem.severity == "error" else "yellow"
    title = f"{problem.severity} · {problem.code} · found {_WHEN[problem.when]}"
    return Panel(Group(*lines), title=escape(title), title_align="left", border_style=colour)


def _tensors(plan: Plan) -> Table:
    table = Table(title="batch tensors", title_justify="left", box=None, header_style="bold")
    for name in ("stage", "tensors", "layout"):
        table.add_column(name)
    rows: dict[tuple[str, str], list[str]] = {}
    for tensor in plan.tensors:
        rows.setdefault((tensor.stage, tensor.layout), []).append(str(tensor))
    for (stage, layout), names in rows.items():
        table.add_row(stage, Text(", ".join(names)), layout)
    return table


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    assert memory is not None
    table = Table(title="memory of one GPU, estimated", title_justify="left", box=None, header_style="bold")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("formula")
    for part in memory.parts:
        table.add_row(part.name, f"{part.gib:.3f}", Text(part.formula))
    table.add_row("uncertainty", "", Text(memory.uncertainty))
    return table


def _alignment(plan: Plan) -> Table:
    state = "ready" if plan.alignment.ready else "not ready"
    table = Table(
        title=f"msProbe's shape-alignment checklist: {state} (trainfer's own capture needs none of it)",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for name in ("condition", "value", "required", "", "remark"):
        table.add_column(name)
    for condition in plan.alignment.conditions:
        mark = Text("ok", style="green") if condition.ok else Text("no", style="red")
        value = Text(shown(condition.value))
        table.add_row(condition.name, value, shown(condition.required), mark, Text(condition.remark))
    return table


def _values(plan: Plan) -> Table:
    table = Table(title="values", title_justify="left", box=None, header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("source", overflow="fold")
    for key, row in plan.values.items():
        if row.source == "default" and row.value is None:
            continue
        value = Text("not known", style="yellow") if row.unknown else Text(_short(row.value))
        source = row.source.rsplit("/", 1)[-1] + (f", beats {', '.join(row.beaten)}" if row.beaten else "")
        table.add_row(key, value, Text(source, style="dim" if row.source == "default" else ""))
    return table


def _short(value: object) -> str:
    text = shown(value) if value is None or isinstance(value, (str, int, float, bool)) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
