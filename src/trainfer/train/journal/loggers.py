"""Other people's loggers: TensorBoard, Weights & Biases, Trackio.

Takes the names under ``trainer.logger`` and each step's metrics; hands them on. ``console`` and ``file`` are
always on (the progress display, ``metrics.jsonl``) and need nothing here. A logger that was asked for and is
not installed is an error before training; one that fails while training is dropped with one warning, because
no run should die of its log.
"""

import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from trainfer.errors import ConfigError

logger = logging.getLogger(__name__)

ALWAYS_ON = ("console", "file")
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
KNOWN = (*ALWAYS_ON, *_PACKAGES)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNames:
    """What a logger calls the run."""

    project: str
    experiment: str
    folder: Path
    """The run folder: TensorBoard's files go to its ``tensorboard/``, others' to ``wandb/`` and so on."""
    resumed_step: int
    config: Mapping[str, object]


class MetricsLogger(Protocol):
    """One destination."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step on."""
        ...

    def close(self) -> None:
        """Hand on whatever waits."""
        ...


class Loggers:
    """Every destination that still works."""

    def __init__(self, destinations: Mapping[str, MetricsLogger]) -> None:
        self._destinations = dict(destinations)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step to each; one that fails is dropped with a warning."""
        for name in list(self._destinations):
            try:
                self._destinations[name].log(step, metrics)
            except Exception as error:  # noqa: BLE001 - code of others, any failure; training must go on
                del self._destinations[name]
                logger.warning(
                    "The logger %s failed at step %d (%s: %s) and is off now; metrics.jsonl has everything.",
                    name,
                    step,
                    type(error).__name__,
                    error,
                )

    def close(self) -> None:
        """Close each; failures are warnings."""
        for name, destination in self._destinations.items():
            try:
                destination.close()
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("The logger %s could not be closed: %s.", name, error)
        self._destinations.clear()


def check_loggers(names: Sequence[str]) -> None:
    """Raise for a name that is unknown or not installed; imports nothing.

    Raises:
        ConfigError: names the logger and the remedy.
    """
    for name in names:
        if name not in KNOWN:
            raise ConfigError(
                f"trainer.logger: {name!r} is not a logger of trainfer; known: {', '.join(KNOWN)}."
            )
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trainer.logger asks for {name}, which is not installed: pip install 'trainfer[{name}]', "
                f"or take {name} out of trainer.logger."
            )


def open_loggers(names: Sequence[str], run: RunNames) -> Loggers:
    """Open each destination; one that cannot be opened is left out with a warning.

    Raises:
        ConfigError: see ``check_loggers``.
    """
    check_loggers(names)
    openers = {"tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio}
    destinations: dict[str, MetricsLogger] = {}
    for name in dict.fromkeys(names):
        if name in ALWAYS_ON:
            continue
        try:
            destinations[name] = openers[name](run)
        except Exception as error:  # noqa: BLE001 - no network, no login, no space: the run goes on without
            logger.warning("The logger %s cannot be started (%s); training goes on without it.", name, error)
    return Loggers(destinations)


class _TensorBoard:
    def __init__(self, run: RunNames) -> None:
        module = _late("torch.utils.tensorboard")
        purge = run.resumed_step + 1 if run.resumed_step else None  # hides the steps that are trained again
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: RunNames) -> None:
        self._run = _late("wandb").init(
            project=run.project, name=run.experiment, dir=str(run.folder), config=dict(run.config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, run: RunNames) -> None:
        self._run = _late("trackio").init(
            project=run.project, name=run.experiment, config=dict(run.config), embed=False, resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _late(name: str) -> ModuleType:
    """Optional packages are imported when they are asked for."""
    return importlib.import_module(name)
