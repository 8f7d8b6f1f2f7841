"""Shows scores: Markdown for the documentation, JSON, and lines of text for a terminal.

Takes scores; gives text.
"""

import dataclasses
import math
from collections.abc import Sequence

import msgspec

from trainfer.faults.catalogue import EMULATED
from trainfer.faults.generators import Generator, controls_of, every_control, faults_of
from trainfer.faults.records import Outcome, Scores
from trainfer.faults.suite import failures
from trainfer.faults.tally import Line, Share, Tally, tally

HEADINGS = ("cases", "module", "top 3", "family", "id", "tokens", "first step", "explained", "s")


def cells(line: Line) -> tuple[str, ...]:
    """One row of a table, in the order of ``HEADINGS``."""
    return (
        str(line.cases),
        _percent(line.top1),
        _percent(line.top3),
        _percent(line.family),
        _percent(line.exact),
        "–" if line.tokens is None else f"{line.tokens:.2f}",
        _percent(line.first_step),
        "–" if line.explained is None else f"{line.explained:.2f}",
        f"{line.seconds:.1f}",
    )


def _percent(share: Share) -> str:
    return "–" if share.value is None else f"{100 * share.value:.0f}%"


def sentence(scores: Scores, result: Tally) -> str:
    """The whole run in one sentence."""
    total = result.total
    parts = [f"{total.cases} faults counted"] if total.cases else []
    if total.top1.of:
        parts.append(f"first module right {total.top1.right} of {total.top1.of}")
    if total.cases:
        parts.append(f"cause family right {total.family.right} of {total.family.of}")
    parts.append(f"{result.alarms} false alarms in {result.controls} controls")
    return f"{', '.join(parts)}; {scores.seeds} seeds, {scores.seconds:.0f} s"


def failure_line(outcome: Outcome) -> str:
    """A failed case: what was planted, what was said."""
    wanted = ", ".join(outcome.expected) + (
        f" at {outcome.expected_module}" if outcome.expected_module else ""
    )
    if outcome.answer is None:
        return f"{outcome.case.title}: planted {wanted}; {outcome.error}"
    answer = outcome.answer
    said = ", ".join(answer.causes) or "no cause"
    where = answer.ranked[0] if answer.ranked else "no module"
    return f"{outcome.case.title}: planted {wanted}; said {answer.verdict}, {said}, {where}"


def markdown(scores: Scores) -> str:
    """The tables of ``docs/faults.md``."""
    result = tally(scores)
    below = result.below
    lines = [
        f"{sentence(scores, result)}.",
        "",
        *_table("cause", (*result.causes, result.total)),
        "",
        "By the size of the effect, for faults that have a size:",
        "",
        *_table("effect over noise", result.bands),
        "",
        f"Below 3× the noise: {below.cases} cases, of which {below.found} were found all the same, {below.quiet} were called "
        f"equal or rounding, and {below.wrong} were called something else.",
        "",
        "### What fails",
        "",
        *_failing(scores),
        "",
        "### Controls",
        "",
        *_controls(scores),
    ]
    return "\n".join(lines) + "\n"


def _table(first: str, lines: Sequence[Line]) -> list[str]:
    head = [f"| {first} | {' | '.join(HEADINGS)} |", f"|{'---|' * (len(HEADINGS) + 1)}"]
    return [*head, *(f"| {line.name} | {' | '.join(cells(line))} |" for line in lines)]


def _failing(scores: Scores) -> list[str]:
    lines = [f"- {failure_line(outcome)}" for outcome in failures(scores)]
    return lines or ["No counted case has a wrong module or family."]


def _controls(scores: Scores) -> list[str]:
    rows = ["| control | what differs | seeds | alarms |", "|---|---|---|---|"]
    for control in every_control():
        own = [item for item in scores.controls if item.name == control.name]
        if own:
            alarms = "; ".join(f"seed {item.seed}: {item.alarm}" for item in own if item.alarm)
            rows.append(f"| {control.name} | {control.summary} | {len(own)} | {alarms or 'none'} |")
    return rows


def fault_list(generator: Generator = Generator.FIRST) -> str:
    """Every fault with what it changes, as a Markdown table."""
    rows = ["| fault | what is changed | sides | sizes |", "|---|---|---|---|"]
    for fault in faults_of(generator).values():
        sizes = ", ".join(f"{size:g}" for size in sorted(fault.magnitudes, reverse=True)) or "–"
        rows.append(f"| `{fault.name}` | {fault.summary} | {', '.join(fault.sides)} | {sizes} |")
    if generator in (Generator.SECOND, Generator.THIRD):
        return "\n".join([*rows, *_control_list(generator)]) + "\n"
    rows += ["", "| cause | what stands for it on a CPU |", "|---|---|"]
    rows += [f"| `{cause}` | {text} |" for cause, text in EMULATED.items()]
    return "\n".join(rows) + "\n"


def _control_list(generator: Generator) -> list[str]:
    rows = (f"| {control.name} | {control.summary} |" for control in controls_of(generator))
    return ["", "| control | what differs |", "|---|---|", *rows]


def as_json(scores: Scores) -> str:
    """Everything, strict JSON."""
    result = tally(scores)
    data = {
        "schema": "trainfer.faults/1",
        "generator": scores.generator,
        "seeds": scores.seeds,
        "seconds": scores.seconds,
        "ok": not result.missed,
        "missed": result.missed,
        "total": _line_data(result.total),
        "causes": [_line_data(line) for line in result.causes],
        "bands": [_line_data(line) for line in result.bands],
        "below": dataclasses.asdict(result.below),
        "controls": [
            {"control": item.name, "seed": item.seed, "alarm": item.alarm or None, "seconds": item.seconds}
            for item in scores.controls
        ],
        "cases": [_case_data(outcome) for outcome in scores.outcomes],
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode()


def _line_data(line: Line) -> dict[str, object]:
    shares = {name: getattr(line, name).value for name in ("top1", "top3", "family", "exact", "first_step")}
    return {
        "name": line.name, "cases": line.cases, **shares, "tokens_iou": line.tokens, "explained": line.explained,
        "seconds": line.seconds,
    }  # fmt: skip


def _case_data(outcome: Outcome) -> dict[str, object]:
    answer = outcome.answer
    ratio = outcome.ratio
    return {
        **dataclasses.asdict(outcome.case),
        "counted": outcome.counted,
        "effect_over_noise": ratio if ratio is not None and math.isfinite(ratio) else None,
        "expected": outcome.expected,
        "expected_module": outcome.expected_module,
        "verdict": None if answer is None else answer.verdict,
        "causes": [] if answer is None else answer.causes,
        "modules": [] if answer is None else answer.ranked[:3],
        "top1": outcome.top1,
        "top3": outcome.top3,
        "family": outcome.family,
        "exact": outcome.exact,
        "tokens_iou": outcome.tokens,
        "first_step": outcome.first_step,
        "explained": outcome.share,
        "seconds": outcome.seconds,
        "error": outcome.error or None,
    }
