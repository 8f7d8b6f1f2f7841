"""Resolves ``${…}`` in settings, by OmegaConf.

Three forms are allowed: ``${section.key}`` (another key), ``${oc.env:NAME}`` or ``${oc.env:NAME,default}``
(an environment variable), ``${config_dir:}`` (the folder of the YAML file); and ``${oc.decode:…}`` to read a
number out of text. Work is bounded: every value is resolved once, after those that it names, and may not
grow beyond 64 KiB.
"""

# OmegaConf's containers are not typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from trainfer.config.settings import Setting, nest
from trainfer.errors import ConfigError

MAX_PER_VALUE = 32
MAX_CHARACTERS = 64 * 1024
_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")
_ALLOWED = ("oc.env", "oc.decode", "config_dir")
_MISSING = "???"


def is_interpolated(value: object) -> bool:
    """True where a value, or a value inside it, holds ``${``."""
    if isinstance(value, list):
        return any(is_interpolated(item) for item in value)
    if isinstance(value, dict):
        return any(is_interpolated(item) for item in value.values())
    return isinstance(value, str) and "${" in value


def resolve(settings: Mapping[str, Setting], *, config_dir: Path) -> dict[str, object]:
    """The values of those settings that hold ``${…}``, resolved.

    Raises ConfigError with key, value and source for what cannot be resolved: an unknown key or variable,
    another resolver, a circle, or a value that grows too large.
    """
    pending = {key: setting for key, setting in settings.items() if is_interpolated(setting.value)}
    if not pending:
        return {}
    for key, setting in pending.items():
        _check_form(key, setting)
    root = _root(settings, pending)
    OmegaConf.register_new_resolver("config_dir", lambda: str(config_dir), replace=True)
    try:
        return _resolve_in_order(root, pending)
    finally:
        OmegaConf.clear_resolver("config_dir")


def _root(settings: Mapping[str, Setting], pending: Mapping[str, Setting]) -> DictConfig:
    values = {key: _MISSING if key in pending else setting.value for key, setting in settings.items()}
    root = OmegaConf.create(nest(values))
    assert isinstance(root, DictConfig), "a mapping makes a DictConfig"
    return root


def _resolve_in_order(root: DictConfig, pending: dict[str, Setting]) -> dict[str, object]:
    resolved: dict[str, object] = {}
    while pending:
        before = len(pending)
        for key, setting in list(pending.items()):
            try:
                OmegaConf.update(root, key, setting.value, force_add=True)
                value = _value_at(root, key)
            except InterpolationToMissingValueError:
                OmegaConf.update(root, key, _MISSING, force_add=True)
                continue
            except (OmegaConfBaseException, RecursionError, ValueError) as error:
                raise ConfigError(
                    f"{_shown(key, setting)} cannot be resolved: {_first_line(error)}."
                ) from error
            if is_interpolated(value) or len(str(value)) > MAX_CHARACTERS:
                raise ConfigError(
                    f"{_shown(key, setting)} resolves to another ${{…}} or to more than 64 KiB."
                )
            OmegaConf.update(root, key, value, force_add=True)
            resolved[key] = value
            del pending[key]
        if len(pending) == before:
            key, setting = next(iter(pending.items()))
            raise ConfigError(
                f"{_shown(key, setting)} cannot be resolved: the keys {', '.join(sorted(pending))} refer to one "
                "another in a circle, or to a required key that is not set."
            )
    return resolved


def _value_at(root: DictConfig, key: str) -> object:
    *folders, name = key.split(".")
    here = OmegaConf.select(root, ".".join(folders)) if folders else root
    value: object = here[name]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _check_form(key: str, setting: Setting) -> None:
    text = str(setting.value)
    if text.count("${") > MAX_PER_VALUE:
        raise ConfigError(f"{_shown(key, setting)}: more than {MAX_PER_VALUE} interpolations in one value.")
    for name in _RESOLVER.findall(text):
        if name not in _ALLOWED:
            raise ConfigError(
                f"{_shown(key, setting)}: the resolver {name!r} is not used here. "
                "Allowed are ${section.key}, ${oc.env:NAME,default}, ${oc.decode:text} and ${config_dir:}."
            )


def _shown(key: str, setting: Setting) -> str:
    return f"{setting.source}: {key} = {str(setting.value)[:80]!r}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
