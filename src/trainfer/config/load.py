"""Reads a configuration: defaults, then a YAML file, then overrides; every value remembers its source.

``load_config`` gives the frozen ``TrainConfig`` and its settings, or one ConfigError with every problem.
``effective_yaml`` writes the result down so that it loads back to the same configuration.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec

from trainfer.config.interpolation import resolve
from trainfer.config.keys import default_values, known_keys, sections
from trainfer.config.overrides import Override, OverrideKind, parse_overrides
from trainfer.config.problems import find_entry, find_problems, located, report
from trainfer.config.schema import TrainConfig
from trainfer.config.settings import DEFAULT, OVERRIDE, Setting, Settings, SettingsBuilder, flatten, nest
from trainfer.config.yaml_file import read_yaml, yaml_line
from trainfer.errors import ConfigError

MAX_COMMENT = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and where each of its values came from."""

    config: TrainConfig
    settings: Settings
    """Every dotted key; keys that follow others hold the value that they came to."""


def load_config(path: Path | None, overrides: Sequence[str]) -> LoadedConfig:
    """Load ``path`` (None: defaults alone) and apply ``overrides`` in Hydra's grammar, in order.

    Raises ConfigError: for a file or override that cannot be read, at once; for unknown keys, keys that
    trainfer does not honour, wrong values and missing ones, all in one message.
    """
    builder = SettingsBuilder()
    if path is not None:
        for leaf in read_yaml(path):
            builder.put(leaf.key, leaf.value, f"{path}:{leaf.line}")
    for override in parse_overrides(overrides):
        apply_override(builder, override)
    settings = builder.build(default_values())
    resolved = resolve(settings, config_dir=Path() if path is None else path.parent)
    settings = Settings(
        {k: replace(s, value=resolved[k]) if k in resolved else s for k, s in settings.items()}
    )
    problems = find_problems(settings)
    if problems:
        raise ConfigError(report(problems))
    config = _convert(settings)
    return LoadedConfig(config=config, settings=_with_final_values(settings, config))


def apply_override(builder: SettingsBuilder, override: Override) -> None:
    """Apply one override: ``key=``, ``+key=`` and ``++key=`` set a key, ``~key`` takes it back to its default.

    Raises ConfigError where ``~`` finds nothing to take back, or another value than the one it names.
    """
    if override.kind is not OverrideKind.DELETE:
        builder.put(override.key, override.value, OVERRIDE)
        return
    held = builder.get(override.key)
    if override.has_value and (held is None or held.value != override.value):
        raise ConfigError(
            f"override {override.text!r}: {override.key} "
            + ("is not set." if held is None else f"holds {held.value!r} ({held.source}).")
            + " ~key=value deletes only that value."
        )
    if not builder.delete(override.key):
        raise ConfigError(f"override {override.text!r}: nothing to delete, {override.key} was not set.")


def effective_yaml(loaded: LoadedConfig) -> str:
    """The configuration as YAML, each value with a comment naming its source; loads back to the same one."""
    lines = ["# The configuration of this run, with the source of every value."]
    previous: list[str] = []
    keys = {name: s for name, s in loaded.settings.items() if find_entry(name) is None}
    for name in _in_schema_order(keys):
        *folders, leaf = name.split(".")
        shared = 0
        while shared < min(len(folders), len(previous)) and folders[shared] == previous[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{yaml_line(folders[depth])}:" for depth in range(shared, len(folders))]
        lines.append(
            f"{'  ' * len(folders)}{yaml_line(leaf)}: {yaml_line(keys[name].value)}  # {_comment(keys[name])}"
        )
        previous = folders
    return "\n".join(lines) + "\n"


def _convert(settings: Settings) -> TrainConfig:
    """The frozen records; only keys of the schema reach them."""
    leaves = {
        name: setting.value
        for name, setting in settings.items()
        if find_entry(name) is None and (name in known_keys() or name not in sections())
    }
    try:
        return msgspec.convert(nest(leaves), TrainConfig)
    except msgspec.ValidationError as error:  # each value alone was right
        raise ConfigError(f"{located(error)}.") from error


def _with_final_values(settings: Settings, config: TrainConfig) -> Settings:
    """Let the keys that follow others show the value that they came to."""
    final = dict(flatten(msgspec.to_builtins(config)))
    merged: dict[str, Setting] = {}
    for name, value in final.items():
        given = settings.get(name)
        value = list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        merged[name] = Setting(value=value, source=DEFAULT) if given is None else replace(given, value=value)
    merged.update(
        {
            name: setting
            for name, setting in settings.items()
            if name not in merged and setting.source != DEFAULT
        }
    )
    return Settings(merged)


def _in_schema_order(names: Iterable[str]) -> list[str]:
    order = {known: number for number, known in enumerate(known_keys())}

    def place(name: str) -> tuple[int, str]:
        key = name
        while key not in order and "." in key:
            key = key.rsplit(".", 1)[0]
        return order.get(key, len(order)), name

    return sorted(names, key=place)


def _comment(setting: Setting) -> str:
    """On one line, printable, and not without end."""
    words = " ".join(setting.describe().split())
    return "".join(c if c.isprintable() else "?" for c in words)[:MAX_COMMENT]
