"""``modules.csv`` and ``modules.xlsx``: one line per compared tensor, under msProbe's names where they mean the same.

Takes an explanation; writes files. ``Result`` is pass, warning (rounding), error (diverged), unmatched or unreadable.
Texts are never formulas: a spreadsheet shows them as they are.
"""
# pyright: standard
# (xlsxwriter's types are partial)

import csv
import math
from pathlib import Path

import xlsxwriter

from trainfer.check.compare.judge import module_label
from trainfer.check.compare.records import PointResult, Status
from trainfer.check.explain.records import Explanation

COLUMNS = (
    "Rollout Name", "Train Name", "Rollout Dtype", "Train Dtype", "Rollout Tensor Shape", "Train Tensor Shape",
    "Matched By", "Rows", "Cosine", "EucDist", "MaxAbsErr", "MeanAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio",
    "Five Thousandths Err Ratio", "Max Ulp", "Bitwise Equal", "Worst Row", "Tolerance", "Result", "Err_message",
)  # fmt: skip
"""Cosine, EucDist, MaxAbsErr, MaxRelativeErr and the two ratios are msProbe's; its NPU is Rollout, its Bench is Train."""

RESULTS = {
    Status.EQUAL: "pass",
    Status.ROUNDING: "warning",
    Status.DIVERGED: "error",
    Status.UNMATCHED: "unmatched",
    Status.UNREADABLE: "unreadable",
    Status.NOT_CHECKED: "unmatched",
}

Cell = str | int | float | None


def rows_of(explanation: Explanation) -> list[list[Cell]]:
    """One row per point, inputs too, in the order of execution; then what had no partner."""
    points = sorted(explanation.comparison.points, key=lambda result: result.order)
    rows = [_row(result) for result in points]
    for name in explanation.comparison.coverage.modules_unmatched:
        blank: list[Cell] = [
            name,
            name,
            *([None] * (len(COLUMNS) - 4)),
            "unmatched",
            "no partner on the other side",
        ]
        rows.append(blank)
    return rows


def _row(result: PointResult) -> list[Cell]:
    point, metrics = result.point, result.metrics
    name = f"{module_label(result)}.{point.direction}.{point.part}"
    name = f"{name}.{point.occurrence}" if point.occurrence else name
    compared = result.status not in (Status.UNMATCHED, Status.UNREADABLE) and metrics.elements > 0
    numbers: list[Cell] = [None] * 11
    if compared:
        numbers = [
            _number(metrics.cosine),
            _number(math.sqrt(max(metrics.sum_difference_squared, 0.0))),
            _number(metrics.max_abs),
            _number(metrics.mean_abs),
            _number(metrics.max_relative),
            metrics.within_thousandth / metrics.elements,
            metrics.within_five_thousandths / metrics.elements,
            metrics.ulp_max,
            metrics.equal / metrics.elements,
            _number(result.worst),
            _number(result.tolerance),
        ]
    return [
        name,
        name,
        *result.dtypes,
        str(list(result.shapes[0])),
        str(list(result.shapes[1])),
        result.how,
        len(result.errors),
        *numbers,
        RESULTS[result.status],
        "; ".join([*_odd(result), *result.notes]),
    ]


def _odd(result: PointResult) -> list[str]:
    metrics = result.metrics
    named = (("rollout", metrics.nan_rollout), ("train", metrics.nan_train), ("both sides", metrics.nan_both))
    return [f"{count} NaN or infinite elements in {where}" for where, count in named if count]


def _number(value: float) -> Cell:
    return value if math.isfinite(value) else str(value)


def write_csv(rows: list[list[Cell]], path: Path) -> None:
    """UTF-8; a text that a spreadsheet would run as a formula gets an apostrophe before it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([[_inert(cell) for cell in row] for row in rows])


def _inert(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" and cell else cell


def write_xlsx(rows: list[list[Cell]], path: Path) -> None:
    """One sheet with a frozen header, filters and the results coloured."""
    options = {"strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True}
    with xlsxwriter.Workbook(str(path), options) as book:
        sheet = book.add_worksheet("modules")
        bold = book.add_format({"bold": True})
        colours = {
            name: book.add_format({"bg_color": colour})
            for name, colour in (
                ("error", "#f8d7d3"),
                ("warning", "#e3ebf8"),
                ("unmatched", "#eceeea"),
                ("unreadable", "#f6e6c8"),
            )
        }
        for column, title in enumerate(COLUMNS):
            sheet.write_string(0, column, title, bold)
        result_column = COLUMNS.index("Result")
        for number, row in enumerate(rows, start=1):
            for column, cell in enumerate(row):
                shade = colours.get(str(row[result_column])) if column == result_column else None
                if isinstance(cell, str):
                    sheet.write_string(number, column, cell[:32_000], shade)
                elif cell is not None:
                    sheet.write_number(number, column, cell, shade)
        sheet.freeze_panes(1, 1)
        sheet.autofilter(0, 0, max(1, len(rows)), len(COLUMNS) - 1)
        sheet.set_column(0, 1, 48)
        sheet.set_column(2, len(COLUMNS) - 1, 14)
