"""What one process of an attached run knows: its settings, which weights it has, the pass that is being captured.

Weights are counted by syncs: the first sync gives the rollout the weights that step 0 samples and trains with, and every later
one ends a step. So the number of a sync, from 0, is both the step and the weights version, in the trainer's process and
in the rollout's alike, after a resume too. Takes models and rows; gives dumps below the run's folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch import nn

from trainfer.check.dump.writer import DumpWriter
from trainfer.check.probe.calls import RowSource
from trainfer.check.probe.capture import MODULE_MEANS, Capture, Means
from trainfer.check.probe.settings import CaptureSettings, check_settings
from trainfer.check.probe.sink import TensorSink
from trainfer.check.probe.weights import WeightWatcher
from trainfer.errors import TrainferError
from trainfer.integrations.verl.journal import Journal
from trainfer.integrations.verl.settings import AttachSettings, from_environment


class StatedWeights(WeightWatcher):
    """Weights that change when somebody says so, at an optimizer step.

    FSDP writes into its shards without changing them, so that the counters of parameters say too much.
    """

    stepped: bool = False

    def changed(self) -> bool:
        """True where an optimizer step was taken since the last ``write``."""
        return self.stepped

    def write(self, *, step: int, version: int) -> None:
        """As ``WeightWatcher``."""
        self.stepped = False
        super().write(step=step, version=version)


@dataclass(slots=True)
class OpenPass:
    """A pass of a step that is being captured."""

    name: str
    step: int
    capture: Capture
    weights: list[StatedWeights] = field(default_factory=list[StatedWeights])

    def stepped(self) -> None:
        """The optimizer has changed the weights; forwards that follow have the next version."""
        for weights in self.weights:
            weights.stepped = True

    def use_rows(self, rows: RowSource) -> None:
        """Name the rows of the calls that follow."""
        self.capture.use_rows(rows)

    def record(
        self,
        *,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        logprobs: Sequence[Sequence[float]],
        sampling: Mapping[str, float | int],
        request_ids: Sequence[str] | None = None,
    ) -> None:
        """Record sequences with the log-probs of their responses."""
        self.capture.record_logprobs(
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            logprobs=logprobs,
            sampling=sampling,
            request_ids=request_ids,
            pass_name=self.name,
        )


@dataclass(slots=True)
class Session:
    """The state of this process."""

    settings: AttachSettings
    journal: Journal
    syncs: int = 0
    """Weight syncs that this process has seen."""
    step: int = 0
    """The step that is running, counted from 0; its weights version too."""
    open_pass: OpenPass | None = None
    _first: int | None = None
    _begun: dict[str, int] = field(default_factory=dict[str, int])

    def synced(self, global_steps: int | None) -> None:
        """The rollout has the trainer's weights: the step before has ended.

        Args:
            global_steps: What verl calls the version; None: it does not say, and syncs are counted. A sync that gives the
                same weights again begins no step.
        """
        self.syncs += 1
        if global_steps is None:
            self.step = self.syncs - 1
            return
        if self._first is None:
            self._first = global_steps
        self.step = global_steps - self._first

    def count(self, name: str) -> int:
        """How often ``name`` came before: 0 the first time. For processes that see no sync."""
        seen = self._begun.get(name, 0)
        self._begun[name] = seen + 1
        return seen

    def begin_pass(
        self, name: str, model: nn.Module, *, step: int | None = None, states_steps: bool = False
    ) -> OpenPass | None:
        """Capture ``model`` until ``end_pass``; None where this step or pass is not asked for.

        Args:
            name: ``old_log_prob``, ``ref_log_prob`` or ``update``.
            model: The module whose forward is called.
            step: The step it belongs to; None: the one that is running.
            states_steps: The caller says by ``OpenPass.stepped`` when weights change; else they are watched.
        """
        number = self.step if step is None else step
        wanted = self.settings.wants_step(number) and name in self.settings.passes
        if not wanted or self.open_pass is not None:
            return None
        stated: list[StatedWeights] = []

        def stating(model: nn.Module, writer: DumpWriter, sink: TensorSink, full: bool) -> StatedWeights:  # noqa: FBT001
            stated.append(StatedWeights(model, writer, sink, full=full))
            return stated[0]

        means = Means(weights=stating) if states_steps else MODULE_MEANS
        opened = Capture(
            model, self.settings.pass_folder(number, name), self._capture_settings(name, number), None, means
        )
        opened.describe_run({"verl": self.settings.verl, "step": number, "attached": True})
        opened.__enter__()
        self.open_pass = OpenPass(name=name, step=number, capture=opened, weights=stated)
        return self.open_pass

    def _capture_settings(self, name: str, version: int) -> CaptureSettings:
        return check_settings(
            side="train",
            pass_name=name,
            weights_version=version,
            level="L0",
            task=self.settings.task,
            backward=False,
            modules=None,
            steps=None,
            ranks=None,
            token_range=None,
            prompts_only=False,
            weights="fingerprint",
            max_bytes=self.settings.max_bytes,
        )

    def end_pass(self, error: BaseException | None = None) -> None:
        """Close the dump of the open pass, if there is one."""
        opened, self.open_pass = self.open_pass, None
        if opened is None:
            return
        try:
            opened.capture.__exit__(None if error is None else type(error), error, None)
        except TrainferError as problem:
            self.journal.problem(f"step {opened.step}, {opened.name}: {problem}")


@cache
def session() -> Session:
    """This process's state.

    Raises:
        AssertionError: nothing is attached; hooks are only there where something is.
    """
    settings = from_environment()
    assert settings is not None, "a hook ran in a process to which nothing is attached"
    return Session(settings=settings, journal=Journal(settings))
