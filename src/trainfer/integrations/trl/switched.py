"""Hooks that are on only while their side computes: one module generates and trains by turns, in two open captures.

Takes what the probe's module hooks take; gives hooks that can be put on and taken off in the middle of a capture.
"""

from collections.abc import Mapping

from torch import nn

from trainfer.check.probe.calls import CallBook
from trainfer.check.probe.gradients import GradientHooks
from trainfer.check.probe.hooks import ModuleHooks
from trainfer.check.probe.settings import CaptureSettings
from trainfer.check.probe.sink import TensorSink


class SwitchedHooks:
    """The hooks of one capture, off at first."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        chosen: set[str],
        settings: CaptureSettings,
        book: CallBook,
        sink: TensorSink,
        gradients: GradientHooks | None,
    ) -> None:
        """See ``ModuleHooks``."""
        self._made_of = (modules, chosen, settings, book, sink, gradients)
        self._on: ModuleHooks | None = None
        self._inner_fired = False
        self._fired: set[str] = set()

    @property
    def fired(self) -> set[str]:
        """Names of modules that ran while the hooks were on."""
        return self._fired | (self._on.fired if self._on else set())

    @property
    def inner_fired(self) -> bool:
        """True where more than the root ran, or there is no more."""
        return self._inner_fired or (self._on is not None and self._on.inner_fired)

    def on(self) -> None:
        """Watch from here on."""
        if self._on is None:
            self._on = ModuleHooks(*self._made_of)

    def off(self) -> None:
        """Watch no more, until ``on``."""
        if self._on is None:
            return
        self._fired, self._inner_fired = self.fired, self.inner_fired
        self._on.close()
        self._on = None

    def close(self) -> None:
        """The capture ends."""
        self.off()
