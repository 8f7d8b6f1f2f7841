"""How a model is watched: by hooks on its modules and the counters of its parameters, or as its engine needs it.

An engine whose forward calls or weights are not those of a plain module hands in ``Means`` of its own; what is written, and
when a dump is incomplete, stays with ``capture``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from trainfer.check.dump.writer import DumpWriter
from trainfer.check.probe.calls import CallBook, WatchedWeights
from trainfer.check.probe.gradients import GradientHooks
from trainfer.check.probe.hooks import ModuleHooks
from trainfer.check.probe.settings import CaptureSettings
from trainfer.check.probe.sink import TensorSink
from trainfer.check.probe.weights import WeightWatcher


class Hooks(Protocol):
    """What watches the modules of an open capture."""

    @property
    def fired(self) -> set[str]:
        """Names of modules that ran."""
        ...

    @property
    def inner_fired(self) -> bool:
        """True where more than the root ran, or there is no more."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


HooksMaker = Callable[
    [Mapping[str, nn.Module], set[str], CaptureSettings, CallBook, TensorSink, GradientHooks | None], Hooks
]
WeightsMaker = Callable[[nn.Module, DumpWriter, TensorSink, bool], WatchedWeights]


def _parameters_of(model: nn.Module, writer: DumpWriter, sink: TensorSink, full: bool) -> WatchedWeights:  # noqa: FBT001
    return WeightWatcher(model, writer, sink, full=full)


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """How a model is watched; an engine whose calls or weights are not those of a plain module brings its own."""

    hooks: HooksMaker = ModuleHooks
    weights: WeightsMaker = _parameters_of
    rank_and_size: tuple[int, int] | None = None
    """None: those of the process group."""
    run_id: str | None = None
    """None: ``TRAINFER_RUN_ID``, or a fresh one."""


MODULE_MEANS = Means()
