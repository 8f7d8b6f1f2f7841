"""report.html of a comparison: one self-contained page.

Takes an explanation; gives HTML with its data, style and script inside: the model tree as a heat map of module ×
token position, the tokens with their log-prob differences, histograms, sortable tables. It loads nothing and sends
nothing. All texts are data for the script or escaped by the template.
"""

import base64
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from trainfer.check.compare.judge import module_label
from trainfer.check.compare.records import Comparison, LogprobResult, PointResult
from trainfer.check.explain.records import Explanation
from trainfer.check.report.document import document, module_part
from trainfer.check.report.text import KINDS, describe_first, in_plain_words

MAX_HEAT_BYTES = 2_600_000
"""Of the error codes before base64; beyond it the sequences that differ least are left out of the map, and named so."""
MAX_TABLE = 2_000
"""Rows of a table."""

NOT_COMPARED, EQUAL, NOT_FINITE = 0, 1, 255
_LOG_LOW, _LOG_HIGH = -9.0, 3.0
"""log10 of the row errors that codes 2 to 254 span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportNames:
    """What the two sides are called in the page."""

    rollout: str
    train: str


def render_comparison(explanation: Explanation, names: ReportNames) -> str:
    """The page as text."""
    comparison = explanation.comparison
    first = explanation.first_divergence
    found = document(explanation)
    return (
        _environment()
        .get_template("comparison.html.jinja")
        .render(
            names=names,
            document=found,
            plain=in_plain_words(explanation),
            kinds=KINDS,
            first=None if first is None else describe_first(first),
            payload=script_json(_payload(explanation, comparison)),
            style=_asset("comparison.css"),
            script=_asset("comparison.js"),
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("trainfer.check.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _asset(name: str) -> str:
    return files("trainfer.check.report").joinpath(name).read_text(encoding="utf-8")


def script_json(value: object) -> str:
    """JSON that may stand in a script element: no ``<``, no line separators."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def encode_errors(errors: NDArray[np.float32]) -> NDArray[np.uint8]:
    """One byte per row error: 1 equal, 2 to 254 the logarithm from 1e-9 to 1e3, 255 NaN or infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        span = (np.log10(errors.astype(np.float64)) - _LOG_LOW) / (_LOG_HIGH - _LOG_LOW)
        codes = np.clip(np.rint(2 + span * 252), 2, 254)
    codes = np.where(errors == 0, EQUAL, np.where(np.isfinite(errors), np.nan_to_num(codes), NOT_FINITE))
    return codes.astype(np.uint8)


def _payload(explanation: Explanation, comparison: Comparison) -> dict[str, object]:
    grid = _Grid(comparison)
    first = explanation.first_divergence
    modules: list[dict[str, object]] = []
    points = _points_by_module(comparison)
    for module in comparison.modules:
        part = module_part(module)
        modules.append(
            {
                "name": module.module,
                "status": part.status,
                "how": part.how,
                "rows": part.rows,
                "maxAbs": part.max_abs,
                "meanAbs": part.mean_abs,
                "cosine": part.cosine,
                "ulp": part.ulp_max,
                "equal": part.bitwise_equal_fraction,
                "introduced": part.introduced,
                "inherited": part.inherited,
                "tolerance": part.noise_floor,
                "notes": part.notes,
                "parts": [_part(result) for result in points.get(module.module, [])],
                "errors": grid.encoded(points.get(module.module, [])),
            }
        )
    return {
        "logLow": _LOG_LOW,
        "logHigh": _LOG_HIGH,
        "first": None
        if first is None
        else {
            "module": first.module,
            "stage": first.stage,
            "tokens": [list(token) for token in first.tokens[:20_000]],
        },
        "sequences": grid.sequences(explanation),
        "leftOut": grid.left_out,
        "modules": modules,
        "logprobs": _logprobs(comparison.logprobs),
    }


def _points_by_module(comparison: Comparison) -> dict[str, list[PointResult]]:
    found: dict[str, list[PointResult]] = {}
    for result in comparison.points:
        if result.point.direction == "output":
            found.setdefault(module_label(result), []).append(result)
    return found


def _part(result: PointResult) -> dict[str, object]:
    return {
        "part": result.point.part,
        "use": result.point.occurrence,
        "status": result.status.value,
        "dtypes": list(result.dtypes),
        "shapes": [list(result.shapes[0]), list(result.shapes[1])],
        "how": result.how,
    }


class _Grid:
    """The columns of the heat map: token positions, sequence after sequence."""

    def __init__(self, comparison: Comparison) -> None:
        lengths = self._lengths(comparison)
        budget = MAX_HEAT_BYTES // max(1, len(comparison.modules))
        order = sorted(lengths, key=lambda label: (-self._worst(comparison, label), label))
        kept: list[int] = []
        for label in order:
            if lengths[label] <= budget or not kept:
                kept.append(label)
                budget -= lengths[label]
        self.kept = sorted(kept)
        self.left_out = len(lengths) - len(kept)
        self._lengths_kept = {label: lengths[label] for label in self.kept}
        starts = np.cumsum([0, *self._lengths_kept.values()]).tolist()
        self._starts = dict(zip(self.kept, starts, strict=False))
        self._total = int(starts[-1])

    @staticmethod
    def _lengths(comparison: Comparison) -> dict[int, int]:
        labels: set[int] = set()
        for result in comparison.points:
            if result.rows is not None and result.point.direction == "output":
                labels.update(int(label) for label in np.unique(result.rows.labels) if label >= 0)
            if len(labels) == len(comparison.rollout_sequences):
                break
        if comparison.logprobs is not None:
            labels.update(int(label) for label in np.unique(comparison.logprobs.labels))
        return {label: len(comparison.rollout_sequences[label].tokens) for label in sorted(labels)}

    @staticmethod
    def _worst(comparison: Comparison, label: int) -> float:
        if comparison.logprobs is None:
            return 0.0
        mine = comparison.logprobs.labels == label
        return float(np.nan_to_num(np.abs(comparison.logprobs.difference[mine]), nan=1e9).max(initial=0.0))

    def encoded(self, results: list[PointResult]) -> str:
        """Codes of one module over all columns, the worst of its outputs, as base64."""
        worst = np.full(self._total, -1.0, dtype=np.float32)
        for result in results:
            rows = result.rows
            if rows is None or len(rows) != len(result.errors):
                continue
            starts = np.array(
                [self._starts.get(int(label), -1) for label in range(int(rows.labels.max(initial=-1)) + 1)]
            )
            use = rows.labels >= 0
            use[use] = starts[rows.labels[use]] >= 0
            lengths = [self._lengths_kept[int(label)] for label in rows.labels[use].tolist()]
            inside = rows.positions[use] < np.array(lengths, dtype=np.int64)
            columns = (starts[rows.labels[use]] + rows.positions[use])[inside]
            np.maximum.at(
                worst, columns, np.nan_to_num(result.errors[use][inside], nan=np.inf, posinf=np.inf)
            )
        codes = encode_errors(np.maximum(worst, 0))
        codes[worst < 0] = NOT_COMPARED
        return base64.b64encode(codes.tobytes()).decode()

    def sequences(self, explanation: Explanation) -> list[dict[str, object]]:
        """Token ids and texts of the columns."""
        found: list[dict[str, object]] = []
        for label in self.kept:
            record = explanation.comparison.rollout_sequences[label]
            tokens = record.tokens[: self._lengths_kept[label]]
            texts = [explanation.texts.get(token, "") for token in tokens] if explanation.texts else []
            found.append(
                {
                    "index": label,
                    "start": self._starts[label],
                    "tokens": list(tokens),
                    "texts": texts,
                    "prompt": record.prompt_length,
                }
            )
        return found


def _logprobs(result: LogprobResult | None) -> dict[str, object] | None:
    if result is None:
        return None
    numbers = np.stack([result.rollout, result.train]).astype(np.float32)
    places = np.stack([result.labels, result.positions]).astype(np.int32)
    return {
        "count": len(result.labels),
        "values": base64.b64encode(numbers.tobytes()).decode(),
        "places": base64.b64encode(places.tobytes()).decode(),
    }
