"""Checks every given setting against the schema and the table of unsupported keys; reports all at once.

Takes settings; gives ``Problem``s: key, value, source, rule and remedy. Each value is converted on its own,
so that one wrong key hides no other.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from trainfer.config.keys import REQUIRED, Key, known_keys, sections
from trainfer.config.settings import DEFAULT, Setting
from trainfer.config.unsupported import Unsupported
from trainfer.config.unsupported_table import UNSUPPORTED

MAX_SHOWN = 20
_NEAR = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong with the configuration."""

    key: str
    message: str
    """Rule and remedy, as sentences."""
    setting: Setting | None = None
    """None for a key that is missing."""

    def __str__(self) -> str:
        if self.setting is None:
            return f"{self.key}: {self.message}"
        value = repr(self.setting.value)
        shown = value if len(value) <= 80 else f"{value[:80]}…"
        return f"{self.key} = {shown} ({self.setting.source}): {self.message}"


def find_problems(settings: Mapping[str, Setting]) -> list[Problem]:
    """Everything wrong with the settings that were given, in their order; then what is missing."""
    problems: list[Problem] = []
    for name, setting in settings.items():
        if setting.source != DEFAULT:
            problems.extend(_check(name, setting))
    problems.extend(_missing(settings))
    return problems


def report(problems: Sequence[Problem]) -> str:
    """All problems as one message."""
    if len(problems) == 1:
        return str(problems[0])
    lines = [f"{len(problems)} problems in the configuration:"]
    lines += [f"  {number}. {problem}" for number, problem in enumerate(problems[:MAX_SHOWN], start=1)]
    if len(problems) > MAX_SHOWN:
        lines.append(f"  and {len(problems) - MAX_SHOWN} more")
    return "\n".join(lines)


def _check(name: str, setting: Setting) -> Iterator[Problem]:
    key = known_keys().get(name)
    if key is not None:
        refusal = _refused_value(name, setting.value)
        if refusal is None:
            yield from _check_value(key, setting)
        else:
            yield Problem(key=name, setting=setting, message=refusal.sentence)
    elif name in sections():
        if setting.value not in ({}, None):
            yield Problem(
                key=name, setting=setting, message="is a section: give the keys below it, not a value."
            )
    else:
        entry = find_entry(name)
        if entry is None:
            yield from _check_below_or_unknown(name, setting)
        elif not entry.accepts(setting.value):
            yield Problem(key=name, setting=setting, message=entry.sentence)


def _check_below_or_unknown(name: str, setting: Setting) -> Iterator[Problem]:
    parents = [known_keys()[parent] for parent in _parents(name) if parent in known_keys()]
    if not parents or parents[0].section is not None:
        yield Problem(key=name, setting=setting, message=_unknown(name))
    elif not parents[0].is_open:
        yield Problem(
            key=name,
            setting=setting,
            message=f"{parents[0].name} is {parents[0].rule}; it has no keys below it.",
        )
    else:
        below: object = setting.value
        for part in reversed(name.removeprefix(f"{parents[0].name}.").split(".")):
            below = {part: below}
        yield from _check_value(parents[0], setting, value=below)


def _check_value(key: Key, setting: Setting, *, value: object = REQUIRED) -> Iterator[Problem]:
    value = setting.value if value is REQUIRED else value
    for leaf in _scalars(value):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            yield Problem(key=key.name, setting=setting, message="must be finite: no nan, no inf.")
            return
        if isinstance(leaf, str) and not _is_utf8(leaf):
            yield Problem(key=key.name, setting=setting, message="holds bytes that are not UTF-8 text.")
            return
    try:
        msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        detail = "" if " - at `$" not in str(error) else f" ({located(error, key.name)})"
        yield Problem(key=key.name, setting=setting, message=f"must be {key.rule}{detail}. {key.description}")


def located(error: msgspec.ValidationError, key: str = "") -> str:
    """What msgspec says, with the place as a dotted key: ``trainfer.warmup: …`` instead of ``… - at `$.trainfer.warmup```."""
    message, _, place = str(error).partition(" - at `$")
    dotted = f"{key}{place.rstrip('`')}".removeprefix(".")
    return f"{dotted}: {message}" if dotted else message


def _scalars(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _scalars(item)
    elif isinstance(value, dict):
        for name, item in cast("dict[object, object]", value).items():
            yield name
            yield from _scalars(item)
    else:
        yield value


def _is_utf8(text: str) -> bool:
    """False for what the operating system hands over undecoded."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _missing(settings: Mapping[str, Setting]) -> Iterator[Problem]:
    for name, key in known_keys().items():
        if key.default is REQUIRED and name not in settings:
            yield Problem(key=name, message=f"is required and not set; {key.rule}. {key.description}")
    model = settings.get("actor_rollout_ref.model.path")
    warmup = any(
        (name == "trainfer.warmup" and setting.value is not None) or name.startswith("trainfer.warmup.")
        for name, setting in settings.items()
    )
    if (model is None or model.value is None) and not warmup:
        yield Problem(
            key="actor_rollout_ref.model.path",
            message="is required and not set; give a local Hugging Face folder, or trainfer.warmup for a tiny model made on the spot.",
        )


def find_entry(name: str) -> Unsupported | None:
    """The entry for a key of verl's that training does not honour; None for every other key."""
    if name in known_keys() or any(parent in known_keys() for parent in _parents(name)):
        return None
    return next((entry for entry in UNSUPPORTED if not entry.refused and entry.matches(name)), None)


def _refused_value(name: str, value: object) -> Unsupported | None:
    return next((e for e in UNSUPPORTED if e.refused and e.matches(name) and not e.accepts(value)), None)


def _unknown(name: str) -> str:
    near = nearest_key(name)
    hint = f"Did you mean {near}?" if near else "`trainfer train --help` lists all keys."
    return f"unknown key. {hint}"


def nearest_key(name: str) -> str | None:
    """The known key most like ``name``, by its whole dotted name or by its last part; None if none is near."""
    best, best_score = None, _NEAR
    leaf = name.rsplit(".", 1)[-1]
    for candidate in (*known_keys(), *sections()):
        whole = difflib.SequenceMatcher(None, name, candidate)
        last = difflib.SequenceMatcher(None, leaf, candidate.rsplit(".", 1)[-1])
        score = max(whole.ratio(), 0.9 * last.ratio() + 0.1 * whole.ratio())
        if score > best_score:
            best, best_score = candidate, score
    return best


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rsplit(".", 1)[0]
        yield name
