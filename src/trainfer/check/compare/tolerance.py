"""How much two equal computations may differ: the one place, as data (``tolerances.json``).

The error of a row is relative: the larger of ‖d‖ / ‖row‖ and max |d| / max |row|. With equal inputs a module may
be off by ``units`` of its coarser dtype (rounding of its result, and within it) and by ``sums`` · u32 · √width (a
sum in another order); its inputs' error may come through ``gain`` times. Whatever its inputs, no row may
be off by more than ``absolute_units`` · u^``absolute_power``, growing by ``per_layer`` with each layer before it.

These are coarse bounds for a comparison without a replay; ``docs/tolerances.md`` shows the measurements behind them.
"""

import re
from functools import cache
from importlib.resources import files

import msgspec

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?:\.|$)")


class ModuleTolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of module."""

    units: float
    sums: float
    gain: float


class LogprobTolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Differences of log-probs, in nats."""

    tail_units: float
    """Of the float32 unit, per nat: the log-softmax itself."""
    without_logits: dict[str, float]
    """Largest |d| by model dtype where logits were not captured."""
    without_logits_mean: dict[str, float]


class Tolerances(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of ``tolerances.json``."""

    unit: dict[str, float]
    """Half the distance of 1 and the next number, by dtype."""
    leaf: ModuleTolerance
    """Modules without submodules."""
    composite: ModuleTolerance
    """Modules with submodules: attention, MLP, layer, model."""
    absolute_units: float
    absolute_power: float
    per_layer: float
    logprobs: LogprobTolerance

    def unit_of(self, dtypes: tuple[str, str]) -> float:
        """Unit of the coarser of two dtypes; 0 for whole numbers, which must be equal."""
        return max((self.unit[dtype] for dtype in dtypes if dtype in self.unit), default=0.0)


@cache
def tolerances() -> Tolerances:
    """The numbers that come with trainfer."""
    data = files("trainfer.check.compare").joinpath("tolerances.json").read_bytes()
    return msgspec.json.decode(data, type=Tolerances)


def layer_of(module: str) -> int | None:
    """Number of the decoder layer that a module belongs to."""
    match = _LAYER.search(module)
    return int(match.group(1)) if match else None
