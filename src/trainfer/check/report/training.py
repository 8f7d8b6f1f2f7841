"""report.html of a run: did it learn, did both policies agree, where did the time go, what does it say now?

Takes a run folder; gives one self-contained page of at most ``MAX_PAGE_BYTES`` (no external resource, a few
lines of script for reading curves by keyboard). What is judged here is only what is certain: equal bits,
proven weights, values that are not numbers. Loads no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from trainfer.check.report.training_curves import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Curve,
    drawable,
    linear_curve,
    log_curve,
    number_text,
)
from trainfer.check.report.training_reading import RunRecord, Series, read_run
from trainfer.errors import RunFolderError

MAX_PAGE_BYTES = 1_000_000
TEMPLATE = "training.html.jinja"
_SCORE = "critic/score/mean"
_DIFF_MAX = "mismatch/logp_abs_diff_max"
_BITWISE = "mismatch/bitwise_equal_fraction"
_TOKENS = "mismatch/tokens"
_STAGES = {
    "gen": "sampling",
    "reward": "scoring",
    "old_log_prob": "actor log-probs",
    "ref": "reference log-probs",
    "adv": "advantages",
    "update_actor": "update",
    "update_weights": "weight hand-over",
    "save_checkpoint": "checkpoints",
    "testing": "validation",
}
_SMALL = (
    ("response_length/mean", "Response length", "tokens, mean per step"),
    ("actor/entropy", "Entropy", "nats per token"),
    ("actor/grad_norm", "Gradient norm", "before clipping"),
    ("actor/kl_loss", "KL to the reference", "nats per token, in the loss"),
    ("actor/reward_kl_penalty", "KL to the reference", "nats per token, in the reward"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The verdict in words."""

    tone: str
    """``exact``, ``measured``, ``broken`` or ``unknown``: decides a colour."""
    headline: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One number that matters."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A curve with its words."""

    key: str
    """Unique in the page."""
    title: str
    about: str
    spoken: str
    """What the curve shows, for those who do not see it."""
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Time of one stage of the loop."""

    name: str
    seconds: float
    """Mean per step, over all steps."""
    share: float
    """Of all stages, 0 to 1."""


def write_training_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page (default ``FOLDER/report.html``) and return its path.

    Raises:
        RunFolderError: the folder holds no step of a run, or the page cannot be written.
    """
    path = folder / "report.html" if out is None else out
    page = render_training_report(read_run(folder))
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"Cannot write {path}: {error.strerror}. Give another file: --out FILE."
        ) from error
    return path


def render_training_report(run: RunRecord) -> str:
    """The page as text."""
    page = _template().render(
        run=run,
        agreement=agreement(run),
        tiles=_tiles(run),
        charts=_charts(run),
        small_charts=_small_charts(run),
        stages=stages(run),
        validations=_validations(run),
        box={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )
    assert len(page.encode()) <= MAX_PAGE_BYTES, "every part of the page is bounded"
    return page


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("trainfer.check.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE)


def agreement(run: RunRecord) -> Agreement:
    """Whether the policy that sampled was the policy that trained, in words that claim no more than was measured."""
    differences = run.series.get(_DIFF_MAX)
    if differences is None:
        return Agreement(
            tone="unknown",
            headline="Agreement was not measured",
            detail="metrics.jsonl holds no log-prob differences between rollout and training.",
        )
    tokens = _compared_tokens(run)
    over = (
        f"over {tokens:,} sampled tokens in {len(differences.values):,} steps" if tokens else "over all steps"
    )
    wrong = [
        step for step, value in zip(differences.steps, differences.values, strict=True) if math.isnan(value)
    ]
    nowhere = (
        sum(run.series["mismatch/nonfinite_tokens"].values)
        if "mismatch/nonfinite_tokens" in run.series
        else 0
    )
    if wrong or nowhere:
        where = f" First at step {wrong[0]:,}." if wrong else f" {nowhere:,.0f} tokens are concerned."
        return Agreement(
            tone="broken",
            headline="Some log-probs are not finite",
            detail=f"A rollout or training log-prob was NaN or infinite.{where}",
        )
    worst = max(range(len(differences.values)), key=lambda index: differences.values[index])
    value, step = differences.values[worst], differences.steps[worst]
    share = _bitwise_share(run)
    if value == 0 and share == 1.0:
        return Agreement(
            tone="exact",
            headline="The policy that sampled is the policy that trained, bit for bit",
            detail=f"Largest |Δlogp| 0 {over}: every token has the same log-prob on both sides.",
        )
    equal = "" if share is None else f" {_percent(share)} of the tokens are bitwise equal."
    return Agreement(
        tone="measured",
        headline=f"Rollout and training differ by at most {number_text(value)} in log-prob",
        detail=f"Largest |Δlogp| {over}, at step {step:,}.{equal}",
    )


def stages(run: RunRecord) -> list[Stage]:
    """Where the time of a step goes, the largest first; what no stage claims is ``other``."""
    steps = max(1, _num_steps(run))
    totals = {
        name.removeprefix("timing_s/"): math.fsum(value for value in series.values if drawable(value))
        for name, series in run.series.items()
        if name.startswith("timing_s/")
    }
    whole = totals.pop("step", 0.0)
    parts = {_STAGES.get(name, name): seconds for name, seconds in totals.items() if seconds > 0}
    if whole > (claimed := sum(parts.values())):
        parts["other"] = whole - claimed
    everything = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return [Stage(name=name, seconds=value / steps, share=value / everything) for name, value in ordered]


def _tiles(run: RunRecord) -> list[Tile]:
    tiles: list[Tile] = []
    scores = run.series.get(_SCORE)
    finite = [value for value in scores.values if drawable(value)] if scores else []
    if finite:
        quarter = max(1, len(finite) // 4)
        first, last = fmean(finite[:quarter]), fmean(finite[-quarter:])
        tiles.append(
            Tile(label="Score", value=f"{first:.2f} → {last:.2f}", note="first quarter → last quarter")
        )
    if _DIFF_MAX in run.series:
        values = run.series[_DIFF_MAX].values
        worst = math.nan if any(map(math.isnan, values)) else max(values)
        share = _bitwise_share(run)
        note = "not measured bit by bit" if share is None else f"{_percent(share)} bitwise equal"
        tiles.append(Tile(label="Largest |Δlogp|", value=number_text(worst), note=note))
    if "weights/fingerprint_match" in run.series:
        matches = run.series["weights/fingerprint_match"].values
        proven = sum(value == 1.0 for value in matches)
        value = f"all {proven:,}" if proven == len(matches) else f"{proven:,} of {len(matches):,}"
        note = "fingerprints of all tensors agree" if proven == len(matches) else "some fingerprints differ"
        tiles.append(Tile(label="Weight hand-overs proven", value=value, note=note))
    seconds = run.series.get("timing_s/step")
    if seconds and len(seconds.values):
        total = math.fsum(value for value in seconds.values if drawable(value))
        tiles.append(
            Tile(
                label="Time",
                value=_duration(total),
                note=f"{len(seconds.values):,} steps, {total / len(seconds.values):.2f} s each",
            )
        )
    return tiles


def _charts(run: RunRecord) -> list[Chart]:
    charts: list[Chart] = []
    validations = _validation_series(run)
    marks: Sequence[tuple[int, float]] = ()
    if len(validations) == 1:
        series = next(iter(validations.values()))
        marks = list(zip(series.steps, series.values, strict=True))
    scores = run.series.get(_SCORE)
    if scores and (curve := linear_curve(scores.steps, scores.values, marks=marks, from_zero=True)):
        about = "Mean score of the sampled responses, per step."
        if curve.marks:
            about += " Dots: validation."
        charts.append(
            Chart(key="score", title="Score", about=about, spoken=_spoken("Score", curve), curve=curve)
        )
    differences = run.series.get(_DIFF_MAX)
    if differences and (curve := log_curve(differences.steps, differences.values)):
        charts.append(
            Chart(
                key="diff",
                title="|Δlogp|, rollout against training",
                about="Largest of any token, per step. The lowest line is exactly 0.",
                spoken=_spoken("Largest log-prob difference", curve),
                curve=curve,
            )
        )
    return charts


def _small_charts(run: RunRecord) -> list[Chart]:
    charts: list[Chart] = []
    for number, (name, title, about) in enumerate(_SMALL):
        series = run.series.get(name)
        if series and (curve := linear_curve(series.steps, series.values)):
            charts.append(
                Chart(
                    key=f"small{number}", title=title, about=about, spoken=_spoken(title, curve), curve=curve
                )
            )
    return charts


def _spoken(what: str, curve: Curve) -> str:
    first, last = curve.points[0], curve.points[-1]
    return f"{what}: {first.value} at {first.step}, {last.value} at {last.step}."


def _validations(run: RunRecord) -> list[tuple[str, str, str, int]]:
    """(data source and measure, first value, last value, number of validations)."""
    return [
        (
            name.removeprefix("val-core/"),
            number_text(series.values[0]),
            number_text(series.values[-1]),
            len(series.values),
        )
        for name, series in sorted(_validation_series(run).items())
    ]


def _validation_series(run: RunRecord) -> dict[str, Series]:
    return {name: series for name, series in run.series.items() if name.startswith("val-core/")}


def _num_steps(run: RunRecord) -> int:
    """Training steps; a line that holds only a validation is none."""
    return len(run.series[_SCORE].values) if _SCORE in run.series else run.num_steps


def _compared_tokens(run: RunRecord) -> int:
    """Response tokens whose two log-probs were compared, over all steps; 0 where no step says."""
    series = run.series.get(_TOKENS)
    return round(math.fsum(value for value in series.values if drawable(value))) if series else 0


def _bitwise_share(run: RunRecord) -> float | None:
    """Of the compared tokens; of the steps, where these do not say how many tokens they compared."""
    series, tokens = run.series.get(_BITWISE), run.series.get(_TOKENS)
    if series is None:
        return None
    weights = dict(zip(tokens.steps, tokens.values, strict=True)) if tokens else {}
    pairs = [
        (weights.get(step, 0.0), value)
        for step, value in zip(series.steps, series.values, strict=True)
        if drawable(value)
    ]
    total = math.fsum(weight for weight, _ in pairs if drawable(weight))
    if total > 0:
        return math.fsum(weight * value for weight, value in pairs if drawable(weight)) / total
    return fmean(value for _, value in pairs) if pairs else None


def _percent(share: float) -> str:
    """``100 %`` only when it is exactly all."""
    return "100 %" if share == 1 else f"{min(share * 100, 99.99):.2f} %"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
