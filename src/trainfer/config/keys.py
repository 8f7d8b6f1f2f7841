"""The schema as a flat table: one ``Key`` for every dotted name, for checking, help and documentation."""

import builtins
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from trainfer.config.fields import Section
from trainfer.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the schema."""

    name: str
    """Dotted, e.g. ``data.train_batch_size``."""
    type: typing.Any
    """What msgspec converts a value to."""
    default: object
    """The written default, before keys that follow others are filled in; ``REQUIRED`` if there is none."""
    description: str
    section: "builtins.type[Section] | None" = None
    """Set for an optional section such as ``trainfer.warmup``: its leaves are keys too."""
    is_open: bool = False
    """True for a mapping whose own keys are free."""

    @property
    def rule(self) -> str:
        """The type in words."""
        return describe_type(self.type)


REQUIRED = msgspec.NODEFAULT


@functools.cache
def known_keys() -> dict[str, Key]:
    """Dotted name -> key, in schema order. Optional sections stand before their leaves."""
    return {key.name: key for key in _walk(TrainConfig, "")}


@functools.cache
def sections() -> dict[str, str]:
    """Dotted name of every section -> its docstring, in schema order."""
    return dict(_walk_sections(TrainConfig, ""))


def default_values() -> dict[str, object]:
    """Dotted key -> default, without required keys and without the inside of optional sections."""
    optional = [key.name for key in known_keys().values() if key.section is not None]
    return {
        name: msgspec.to_builtins(key.default)
        for name, key in known_keys().items()
        if key.default is not REQUIRED and not any(name.startswith(f"{other}.") for other in optional)
    }


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for field in msgspec.structs.fields(section):
        name = f"{prefix}{field.name}"
        inner = section_of(field.type)
        if inner is not None and not _allows_null(field.type):
            yield from _walk(inner, f"{name}.")
            continue
        default: object = field.default
        if field.default_factory is not REQUIRED:
            default = field.default_factory()
        yield Key(
            name=name,
            type=field.type,
            default=default,
            description=describe(field.type),
            section=inner,
            is_open=typing.get_origin(_bare(field.type)) is dict,
        )
        if inner is not None:
            yield from _walk(inner, f"{name}.")


def _walk_sections(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(section):
        inner = section_of(field.type)
        if inner is not None:
            name = f"{prefix}{field.name}"
            yield name, " ".join((inner.__doc__ or "").split())
            yield from _walk_sections(inner, f"{name}.")


def section_of(annotation: typing.Any) -> type[Section] | None:
    """The section that a field holds, if it holds one (or null)."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def describe(annotation: typing.Any) -> str:
    """The description that a field was annotated with."""
    metas = [m for m in _metas(annotation) if m.description is not None]
    return metas[0].description or "" if metas else ""


def describe_type(annotation: typing.Any) -> str:
    """A type in words, e.g. ``an integer of at least 1, or null``."""
    options = [_describe_option(option, _metas(annotation)) for option in _options(annotation)]
    unique = list(dict.fromkeys(options))
    return ", or ".join(unique) if len(unique) > 2 else " or ".join(unique)


def _describe_option(annotation: typing.Any, outer: list[msgspec.Meta]) -> str:
    bare, metas = _bare(annotation), [*outer, *_metas(annotation)]
    origin = typing.get_origin(bare)
    if bare is type(None):
        return "null"
    if origin is typing.Literal:
        values = [_word(value) for value in typing.get_args(bare)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin is tuple:
        return _describe_list(typing.get_args(bare))
    if origin is dict or section_of(bare) is not None:
        return "a mapping"
    noun = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[bare]
    return noun + _bounds(metas) if bare in (int, float) else noun


def _describe_list(items: tuple[typing.Any, ...]) -> str:
    if items[-1] is Ellipsis:
        return f"a list, each {describe_type(items[0])}"
    return f"a list of {len(items)}, each {describe_type(items[0])}"


def _bounds(metas: list[msgspec.Meta]) -> str:
    words: list[str] = []
    for meta in metas:
        for text, bound in (
            ("at least", meta.ge),
            ("above", meta.gt),
            ("at most", meta.le),
            ("below", meta.lt),
        ):
            if bound is not None:
                words.append(f"{text} {bound:g}")
    return f" {' and '.join(dict.fromkeys(words))}" if words else ""


def _word(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _bare(annotation: typing.Any) -> typing.Any:
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _metas(annotation: typing.Any) -> list[msgspec.Meta]:
    if typing.get_origin(annotation) is not typing.Annotated:
        return []
    inner, *metas = typing.get_args(annotation)
    return [*(m for m in metas if isinstance(m, msgspec.Meta)), *_metas(inner)]


def _options(annotation: typing.Any) -> list[typing.Any]:
    bare = _bare(annotation)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return [inner for option in typing.get_args(bare) for inner in _options(option)]
    return [annotation]


def _allows_null(annotation: typing.Any) -> bool:
    return type(None) in _options(annotation)
