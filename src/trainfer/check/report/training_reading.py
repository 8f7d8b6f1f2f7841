"""What a run folder says, read with bounds: a run may be huge, unfinished or damaged.

Takes the folder that ``trainfer train`` writes; gives ``RunRecord``: one array of floats per metric that the
report shows, some sample rollouts, texts for the appendix, and notes on everything that could not be read.
Line by line; memory is about 8 bytes per step and shown metric. Loads no torch.
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import yaml

from trainfer.check.report.captured import StepVerdict, read_verdicts
from trainfer.errors import RunFolderError

Json = dict[str, Any]

MAX_LINE_BYTES = 4_000_000
MAX_TEXT_BYTES = 60_000
"""Of config and plan shown in the appendix."""
MAX_SAMPLE_LINES = 2_000
MAX_SAMPLE_CHARACTERS = 1_500
NUM_SAMPLES = 4
MAX_SERIES = 64
MAX_CAPTURED = 50

SHOWN = (
    "critic/score/mean",
    "mismatch/logp_abs_diff_max",
    "mismatch/logp_abs_diff_mean",
    "mismatch/bitwise_equal_fraction",
    "mismatch/nonfinite_tokens",
    "mismatch/tokens",
    "weights/fingerprint_match",
    "weights/version",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "perf/total_num_tokens",
    "global_seqlen/mean",
)
PREFIXES = ("val-core/", "timing_s/")
BEFORE_TRAINING = "val-before-train/"
"""Stands in the first step's line for a validation that was made before it: step 0 of its ``val-core/`` series."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One metric over the steps that report it. NaN stays NaN."""

    steps: "array[int]"
    values: "array[float]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response as text, shortened."""

    prompt: str
    response: str
    expected: str
    score: str
    finish_reason: str


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """Everything the report needs, filled by ``read_run``."""

    name: str
    model: str
    series: dict[str, Series] = field(default_factory=dict[str, Series])
    num_steps: int = 0
    first_step: int = 0
    last_step: int = 0
    first_samples: tuple[int, tuple[Sample, ...]] | None = None
    last_samples: tuple[int, tuple[Sample, ...]] | None = None
    config_text: str = ""
    plan_text: str = ""
    versions: str = ""
    captured: tuple[StepVerdict, ...] = ()
    """Steps whose two sides were captured and compared; at most ``MAX_CAPTURED``, the last ones."""
    notes: list[str] = field(default_factory=list[str])
    """What could not be read, in words."""


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        RunFolderError: it holds no step of a run.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise RunFolderError(
            f"{folder} holds no metrics.jsonl: give the run folder that `trainfer train` named."
        )
    notes: list[str] = []
    config_text = _text(folder / "config.yaml", notes)
    name, model = _names(config_text, folder)
    record = RunRecord(name=name, model=model, config_text=config_text, notes=notes)
    record.plan_text = _text(folder / "plan.json", notes)
    record.versions = _versions(folder / "starts.jsonl")
    record.captured = read_verdicts(folder)[-MAX_CAPTURED:]
    _read_metrics(metrics, record)
    if record.num_steps == 0:
        raise RunFolderError(f"{metrics} holds no readable step yet: wait for the first step of the run.")
    numbers = sorted(int(path.stem) for path in (folder / "rollouts").glob("*.jsonl") if path.stem.isdigit())
    if numbers:
        record.first_samples = _samples(folder / "rollouts", numbers[0], notes)
        if len(numbers) > 1:
            record.last_samples = _samples(folder / "rollouts", numbers[-1], notes)
    return record


def objects(file: BinaryIO) -> Iterator[Json | None]:
    """Every line as a JSON object; None for one that is torn, damaged or too long."""
    while line := file.readline(MAX_LINE_BYTES):
        try:
            yield msgspec.json.decode(line, type=Json)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield None


def _read_metrics(path: Path, record: RunRecord) -> None:
    damaged = 0
    try:
        with path.open("rb") as file:
            for entry in objects(file):
                step = None if entry is None else entry.pop("step", None)
                after = record.last_step if record.num_steps else -1
                if entry is None or type(step) is not int or not after < step < 2**53:
                    damaged += 1
                    continue
                _take(entry, step, record)
    except OSError as error:
        raise RunFolderError(f"Cannot read {path}: {error.strerror}.") from error
    if damaged:
        record.notes.append(
            f"{damaged} line(s) of metrics.jsonl are damaged or out of order and are left out."
        )


def _take(entry: Json, step: int, record: RunRecord) -> None:
    words = _mapping(entry.pop("non_finite", None))
    if record.num_steps == 0:
        record.first_step = step
    record.last_step = step
    record.num_steps += 1
    for name, value in entry.items():
        before = record.num_steps == 1 and name.startswith(BEFORE_TRAINING)
        if not before and name not in SHOWN and not name.startswith(PREFIXES):
            continue
        shown = f"val-core/{name.removeprefix(BEFORE_TRAINING)}" if before else name
        number = _number(value if value is not None else words.get(name))
        if number is None or (shown not in record.series and len(record.series) >= MAX_SERIES):
            continue
        series = record.series.setdefault(shown, Series(steps=array("q"), values=array("d")))
        place = 0 if before else len(series.steps)
        series.steps.insert(place, 0 if before else step)
        series.values.insert(place, number)


def _number(value: object) -> float | None:
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _samples(folder: Path, step: int, notes: list[str]) -> tuple[int, tuple[Sample, ...]] | None:
    """The first response of each of the first prompts: not chosen by how good they are."""
    path = folder / f"{step}.jsonl"
    found: dict[int, Sample] = {}
    try:
        with path.open("rb") as file:
            for number, entry in enumerate(objects(file)):
                if number >= MAX_SAMPLE_LINES or len(found) >= NUM_SAMPLES:
                    break
                group = None if entry is None else entry.get("group")
                if entry is not None and type(group) is int and group not in found:
                    found[group] = _sample(entry)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    if not found:
        notes.append(f"rollouts/{path.name} holds no readable sequence.")
        return None
    return step, tuple(found[group] for group in sorted(found))


def _sample(entry: Json) -> Sample:
    messages = entry.get("messages")
    listed = cast("list[object]", messages) if isinstance(messages, list) else []
    contents = [str(_mapping(message).get("content", "")) for message in listed]
    return Sample(
        prompt=_shortened("\n".join(contents)),
        response=_shortened(str(entry.get("response", ""))),
        expected=_shortened(str(entry.get("ground_truth", "")), 200),
        score=_shortened(_score_text(entry.get("score")), 40),
        finish_reason=_shortened(str(entry.get("finish_reason", "")), 40),
    )


def _score_text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _shortened(text: str, limit: int = MAX_SAMPLE_CHARACTERS) -> str:
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else f"{clean[:limit]} … ({len(clean) - limit:,} more characters)"


def _text(path: Path, notes: list[str]) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return ""
    if len(data) > MAX_TEXT_BYTES:
        notes.append(f"{path.name} is shown up to {MAX_TEXT_BYTES:,} bytes.")
    return data[:MAX_TEXT_BYTES].decode("utf-8", "replace")


def _names(config_text: str, folder: Path) -> tuple[str, str]:
    """(project / experiment, model), the folder's name where the configuration does not say."""
    try:
        config = yaml.safe_load(config_text)
    except (yaml.YAMLError, ValueError, RecursionError):
        config = None
    trainer = _mapping(_mapping(config).get("trainer"))
    model = _mapping(_mapping(_mapping(config).get("actor_rollout_ref")).get("model")).get("path")
    made = _mapping(_mapping(_mapping(config).get("trainfer")).get("warmup")).get("architecture")
    parts: list[object] = [trainer.get("project_name"), trainer.get("experiment_name")]
    name = " / ".join(part[:80] for part in parts if isinstance(part, str))
    if isinstance(made, str):  # it is what trains, whatever else is named
        model = f"tiny {made} made on the spot"
    return name or folder.resolve().name, model[:200] if isinstance(model, str) else "unknown model"


def _mapping(value: object) -> Json:
    """The value if it is a mapping, else an empty one."""
    return cast("Json", value) if isinstance(value, dict) else {}


def _versions(path: Path) -> str:
    """Of the last start, e.g. ``torch 2.13.0, transformers 5.17.0``."""
    last: Json = {}
    try:
        with path.open("rb") as file:
            for entry in objects(file):
                last = entry or last
    except OSError:
        return ""
    versions = _mapping(last.get("versions"))
    return ", ".join(f"{str(name)[:40]} {str(version)[:40]}" for name, version in list(versions.items())[:12])
