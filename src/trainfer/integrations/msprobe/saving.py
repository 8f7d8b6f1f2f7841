"""Single values at level debug: ``PrecisionDebugger.save``.

Takes tensors, numbers and nests of them; writes ``debug.json`` (``NAME.0.debug``, gradients ``NAME_grad.0.debug``) and,
for task tensor, their files. Gradients come through hooks on the tensors, which change nothing.
"""
# pyright: standard
# (torch's hook types are partial)

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trainfer.errors import CaptureError
from trainfer.integrations.msprobe.leaf import TENSOR_FOLDER, Keep, scalar_leaf, tensor_leaf
from trainfer.integrations.msprobe.options import DebuggerOptions
from trainfer.integrations.msprobe.writer import write_json

_MAX_DEPTH = 8


class ValueSaver:
    """The saved values of one step and rank."""

    def __init__(self, folder: Path, options: DebuggerOptions) -> None:
        self._folder, self._options = folder, options
        self._counts: dict[str, int] = defaultdict(int)
        self._data: dict[str, object] = {}
        self._keep = Keep(values=options.task == "tensor", checksum=options.checksums)

    def save(self, variable: object, name: str, *, gradients: bool) -> None:
        """Save a value now and, where asked, its gradients when they come.

        Raises:
            CaptureError: a part of it is neither a tensor nor a plain value.
            OSError: it cannot be written.
        """
        number = self._counts[name]
        self._counts[name] += 1
        record = f"{name}.{number}.debug"
        self._data[record] = self._value(variable, record, 0)
        if gradients:
            self._watch(variable, f"{name}_grad.{number}.debug")

    def write(self) -> None:
        """Write ``debug.json``.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder / TENSOR_FOLDER
        head = {
            "task": self._options.task,
            "level": "debug",
            "framework": "pytorch",
            "dump_data_dir": str(folder.absolute()) if folder.is_dir() else None,
            "data": self._data,
        }
        write_json(self._folder / "debug.json", head)

    def _value(self, value: object, file: str, depth: int) -> object:
        if isinstance(value, Tensor):
            return tensor_leaf(value, file, self._folder, self._keep, requires_grad=value.requires_grad)
        is_plain, leaf = scalar_leaf(value)
        if is_plain:
            return leaf
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            return {str(key): self._value(item, f"{file}.{key}", depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
            return [self._value(item, f"{file}.{place}", depth + 1) for place, item in enumerate(value)]
        raise CaptureError(
            f"save: {file} is a {type(value).__name__}; give tensors, numbers, texts, or lists and mappings of them"
        )

    def _watch(self, value: object, record: str) -> None:
        members: list[tuple[str, object]] = []
        if isinstance(value, Mapping):
            members = [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            members = [(str(place), item) for place, item in enumerate(value)]
        for key, item in members:
            self._watch(item, f"{record}.{key}")
        if isinstance(value, Tensor) and value.requires_grad:
            self._data.setdefault(record, None)
            value.register_hook(lambda gradient: self._gradient(gradient, record))

    def _gradient(self, gradient: Tensor, record: str) -> None:
        self._data[record] = self._value(gradient, record, 0)
