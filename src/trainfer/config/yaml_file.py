"""Reads one YAML file into leaves with their lines, bounded and without executing anything; writes single values.

Takes a path; gives ``YamlLeaf``s in file order. PyYAML's safe loader does the syntax. Numbers such as
``1e-6`` are floats and dates are text, as OmegaConf (and so verl) reads them. Leaves out interpolations
and every question of which keys exist.
"""

# PyYAML is not typed.
# pyright: reportUnknownMemberType=false

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml

from trainfer.errors import ConfigError

MAX_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 32

_MAP, _SEQ, _MERGE = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:merge"
_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
        |[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlLeaf:
    """One value of a file. Example: ``YamlLeaf(key="data.seed", value=3, line=7)``."""

    key: str
    value: object
    line: int
    """1-based; the line where the key stands."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with OmegaConf's reading of numbers and dates."""

    yaml_implicit_resolvers: ClassVar = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that ``_Loader`` would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Escapes, in double quotes, what could end a line."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def yaml_line(value: object) -> str:
    """A value on one line of YAML, such that ``read_yaml`` (and PyYAML's safe loader) reads it back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**31, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml(path: Path, *, dotted_keys: bool = False) -> list[YamlLeaf]:
    """The leaves of a YAML file whose top is a mapping.

    With ``dotted_keys`` a key ``a.b`` means ``b`` below ``a``; without, it is refused.

    Raises ConfigError, naming file and line, for a file that is missing, not a regular file, too large,
    not UTF-8, not YAML, not a mapping, nested or expanded too far, or that gives a key twice.
    """
    text = _read_text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(
                f"{path}: the file is empty. Expected a YAML mapping such as `data: {{train_files: …}}`."
            )
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{path}:{_line(node)}: the top of the file is not a mapping but {_kind(node)}. "
                "Expected lines such as `data:` with keys below."
            )
        walk = _Walk(path=path, loader=loader, dotted_keys=dotted_keys)
        return list(walk.leaves(node, prefix="", depth=0))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} levels deep.") from None


def _read_text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a folder; expected a YAML file.")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a regular file; expected a YAML file.")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Expected the path of a YAML configuration.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB; not a configuration file.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from error


class _Walk:
    """Walks a node graph as a tree, counting what aliases expand to."""

    def __init__(self, *, path: Path, loader: yaml.SafeLoader, dotted_keys: bool = False):
        self._path = path
        self._dotted_keys = dotted_keys
        self._loader = loader
        self._num_nodes = 0

    def leaves(self, node: yaml.MappingNode, *, prefix: str, depth: int) -> Iterator[YamlLeaf]:
        for key, line, child in self._pairs(node, prefix=prefix, depth=depth):
            dotted = f"{prefix}.{key}" if prefix else key
            if isinstance(child, yaml.MappingNode) and child.value:
                yield from self.leaves(child, prefix=dotted, depth=depth + 1)
            else:
                yield YamlLeaf(key=dotted, value=self._value(child, depth=depth + 1), line=line)

    def _pairs(
        self, node: yaml.MappingNode, *, prefix: str, depth: int
    ) -> Iterator[tuple[str, int, yaml.Node]]:
        """Key, line and value node; what ``<<`` merges comes first and gives way to the mapping's own keys."""
        self._enter(node, depth=depth)
        if node.tag != _MAP:
            raise ConfigError(f"{self._at(node)}: the YAML tag {node.tag} is not read. Use a plain mapping.")
        own: dict[str, tuple[int, yaml.Node]] = {}
        merged: dict[str, tuple[int, yaml.Node]] = {}
        for key_node, child in node.value:
            if key_node.tag == _MERGE:
                for key, line, value in self._merged(child, prefix=prefix, depth=depth + 1):
                    merged.setdefault(key, (line, value))
                continue
            key = self._key(key_node)
            if key in own:
                dotted = f"{prefix}.{key}" if prefix else key
                raise ConfigError(
                    f"{self._at(key_node)}: the key {dotted} is given twice, first in line {own[key][0]}. Keep one."
                )
            own[key] = (_line(key_node), child)
        for key, (line, child) in {**merged, **own}.items():
            yield key, line, child

    def _merged(self, node: yaml.Node, *, prefix: str, depth: int) -> Iterator[tuple[str, int, yaml.Node]]:
        if isinstance(node, yaml.MappingNode):
            yield from self._pairs(node, prefix=prefix, depth=depth)
        elif isinstance(node, yaml.SequenceNode):
            for child in node.value:
                yield from self._merged(child, prefix=prefix, depth=depth + 1)
        else:
            raise ConfigError(f"{self._at(node)}: << merges mappings only.")

    def _key(self, node: yaml.Node) -> str:
        value = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(value, str) or not value:
            shown = node.value if isinstance(node, yaml.ScalarNode) else _kind(node)
            raise ConfigError(f"{self._at(node)}: the key {shown!r} is not text. Put quotes around it.")
        if "." in value and not (self._dotted_keys and all(value.split("."))):
            raise ConfigError(
                f"{self._at(node)}: the key {value!r} holds a dot. In YAML write one level below the other; "
                "dotted keys are for overrides on the command line."
            )
        return value

    def _value(self, node: yaml.Node, *, depth: int) -> object:
        if isinstance(node, yaml.MappingNode):
            return {
                key: self._value(v, depth=depth + 1)
                for key, _, v in self._pairs(node, prefix="", depth=depth)
            }
        self._enter(node, depth=depth)
        if isinstance(node, yaml.SequenceNode):
            if node.tag != _SEQ:
                raise ConfigError(f"{self._at(node)}: the YAML tag {node.tag} is not read. Use a plain list.")
            return [self._value(child, depth=depth + 1) for child in node.value]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> object:
        try:
            value: object = self._loader.construct_object(node)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        except (ValueError, OverflowError, LookupError) as error:
            raise ConfigError(
                f"{self._at(node)}: {str(node.value)[:40]!r} cannot be read: {error}."
            ) from error
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise ConfigError(f"{self._at(node)}: the YAML tag {node.tag} is not read. Use text or a number.")

    def _enter(self, node: yaml.Node, *, depth: int) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise ConfigError(
                f"{self._path}: more than {MAX_NODES} values once aliases (*name) are expanded."
            )
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self._at(node)}: nested more than {MAX_DEPTH} levels deep.")

    def _at(self, node: yaml.Node) -> str:
        return f"{self._path}:{_line(node)}"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a single value"
