"""msProbe's record names, dtypes and statistics in trainfer's words, and back.

``Module.{path}.{Class}.forward.{call}`` is a module's forward call; ``.backward.{call}`` its gradients, ``.parameters_grad.{n}``
those of its parameters; ``{Functional|Torch|Tensor|…}.{api}.{call}.{forward|backward}`` a function's. Plain data only.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from trainfer.check.dump.records import Role, Statistics

DTYPES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int16": "I16",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.complex64": "C64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}
TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}

_MODULE = re.compile(
    r"Module\.(?P<path>.+)\.(?P<kind>[^.]+)\.(?P<phase>forward|backward|parameters_grad)\.(?P<call>\d{1,9})"
)
_FUNCTION = re.compile(r"(?P<family>[A-Za-z]+)\.(?P<api>.+)\.(?P<call>\d{1,9})\.(?P<phase>forward|backward)")
_MAX_DEPTH = 8

ROLES = {
    ("forward", "input_args"): Role.INPUT,
    ("forward", "input_kwargs"): Role.INPUT,
    ("forward", "output"): Role.OUTPUT,
    ("backward", "input"): Role.OUTPUT_GRADIENT,
    ("backward", "output"): Role.INPUT_GRADIENT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordName:
    """A record's name taken apart. Example: ``Module.lm_head.Linear.forward.0``."""

    module: str
    kind: str
    """Class of the module; empty for functions."""
    function: str | None
    phase: str
    call: int


def parse_name(name: str) -> RecordName | None:
    """The parts of a record's name, or None where it is not one."""
    found = _MODULE.fullmatch(name)
    if found is not None:
        return RecordName(
            module=found["path"],
            kind=found["kind"],
            function=None,
            phase=found["phase"],
            call=int(found["call"]),
        )
    found = _FUNCTION.fullmatch(name)
    if found is None:
        return None
    function = f"{found['family']}.{found['api']}"
    return RecordName(module="", kind="", function=function, phase=found["phase"], call=int(found["call"]))


def tensor_leaves(value: object, name: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(name, leaf) of every tensor below a value: ``0``, ``0.1``, ``hidden_states``."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        if mapping.get("type") == "torch.Tensor":
            yield name, mapping
            return
        if "type" in mapping and "value" in mapping:
            return
        for key, item in mapping.items():
            yield from tensor_leaves(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(cast("Sequence[object]", value)):
            yield from tensor_leaves(item, f"{name}.{place}" if name else str(place), depth + 1)


def statistics_of(leaf: Mapping[str, object], shape: Sequence[int]) -> Statistics | None:
    """The four numbers of msProbe; None where one of them is missing. It counts no NaN: one is said where a number is NaN."""
    if not {"Max", "Min", "Mean", "Norm"} <= set(leaf):
        return None
    numbers = {key: leaf[key] for key in ("Max", "Min", "Mean", "Norm")}
    floats = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
    nan = any(math.isnan(value) for value in floats.values())
    inf = any(math.isinf(floats[key]) for key in ("Max", "Min") if key in floats)
    finite = {key: value if math.isfinite(value) else None for key, value in floats.items()}
    return Statistics(
        count=math.prod(shape),
        nan=int(nan),
        inf=int(inf),
        zeros=0,
        min=finite.get("Min"),
        max=finite.get("Max"),
        mean=finite.get("Mean"),
        norm=finite.get("Norm"),
        quantiles=None,
        quantile_sample=0,
    )
