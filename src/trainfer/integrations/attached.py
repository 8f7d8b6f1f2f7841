"""What an attached run's folder says: each captured step's rollout against each of its training passes, and every sync.

Takes the folder that ``trainfer attach`` filled; gives diagnoses, and proofs of the weights. A pass of the reference model is
never judged against the rollout: its weights are others from the first update on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainfer.check.align.names import name_map
from trainfer.check.align.weights import Weights, weights_by_version
from trainfer.check.compare.source import DumpSide
from trainfer.check.diagnose import Diagnosis
from trainfer.check.dump.folder import LEADER_MANIFEST
from trainfer.check.dump.records import WeightRecord
from trainfer.integrations.dumps import compare
from trainfer.integrations.parts import part_folders

JUDGED = ("old_log_prob", "update")
"""Passes that compute with the weights that the rollout sampled from."""
_STEP = re.compile(r"step_(\d{1,12})")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPass:
    """Two sides that should agree."""

    step: int
    pass_name: str
    rollout: Path
    train: Path
    report: Path
    """Where its report belongs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncProof:
    """One sync: the rollout's weights against the trainer's."""

    version: int
    rollout: str
    """``rollout-0``."""
    compared: int
    differing: tuple[str, ...]
    """Parameters whose fingerprints differ, or that one side lacks."""

    @property
    def holds(self) -> bool:
        """True where every parameter was found equal."""
        return self.compared > 0 and not self.differing


def step_passes(folder: Path) -> list[StepPass]:
    """Every training pass below an attached run's folder that has a rollout beside it, in the order of the run."""
    ours = [
        StepPass(
            step=step,
            pass_name=name,
            rollout=path / "rollout",
            train=path / name,
            report=path / f"report-{name}",
        )
        for step, path in _steps(folder)
        for name in JUDGED
    ]
    recipe = [
        StepPass(
            step=step,
            pass_name="update_actor",
            rollout=folder / "generate_sequences" / path.name,
            train=path,
            report=folder / "report" / path.name,
        )
        for step, path in _steps(folder / "update_actor")
    ]
    found = [item for item in (*ours, *recipe) if _is_dump(item.train) and _is_dump(item.rollout)]
    return sorted(found, key=lambda item: (item.step, item.pass_name))


def judge(step_pass: StepPass, model: Path | None) -> Diagnosis:
    """Compare one pass with its rollout and write its report.

    Raises:
        DumpError: a dump cannot be read.
    """
    history = step_pass.train.parent.parent / "weights" / "train"
    train = _TrainSide(step_pass.train, DumpSide(history)) if _is_dump(history) else step_pass.train
    result = compare(step_pass.rollout, train, model=model)
    result.write(step_pass.report)
    return result


class _TrainSide(DumpSide):
    """A training pass that knows the weights of the syncs before it: a parameter that was left behind has an origin."""

    def __init__(self, folder: Path, history: DumpSide) -> None:
        super().__init__(folder)
        self._history = history

    def weights(self, rank: int) -> Iterator[WeightRecord]:
        """Its own, then those of earlier versions."""
        own = list(super().weights(rank))
        first = min((record.weights_version for record in own), default=0)
        yield from own
        if rank in self._history.ranks:
            yield from (r for r in self._history.weights(rank) if r.weights_version < first)


def sync_proofs(folder: Path) -> Iterator[SyncProof]:
    """One for each sync and engine whose weights both sides have written."""
    weights = folder / "weights"
    if not _is_dump(weights / "train"):
        return
    names = name_map()
    train = weights_by_version(DumpSide(weights / "train"), names)
    for path in sorted(weights.glob("rollout-*")):
        if not _is_dump(path):
            continue
        held = weights_by_version(DumpSide(path), names)
        for version in sorted(set(train) & set(held)):
            yield _proof(version, path.name, held[version], train[version])


def _proof(version: int, name: str, rollout: Weights, train: Weights) -> SyncProof:
    differing: list[str] = []
    compared = 0
    for weight in {**train, **rollout}:
        held, sent = rollout.get(weight), train.get(weight)
        if held is not None and sent is not None:
            compared += 1
            if not held.fingerprint or held.fingerprint != sent.fingerprint:
                differing.append(weight)
        elif not _is_tied(held or sent, rollout if held is None else train):
            differing.append(weight)
    return SyncProof(version=version, rollout=name, compared=compared, differing=tuple(differing))


def _is_tied(weight: object, other: Weights) -> bool:
    """A tied name that the other side does not list twice."""
    tied_to = getattr(weight, "tied_to", None)
    fingerprint = getattr(weight, "fingerprint", "")
    return tied_to in other or any(item.fingerprint == fingerprint != "" for item in other.values())


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Number and path of every ``step_N`` below a folder."""
    matched = [(_STEP.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return [(int(match.group(1)), path) for match, path in matched if match]


def _is_dump(folder: Path) -> bool:
    return (folder / LEADER_MANIFEST).exists() or (folder.is_dir() and bool(part_folders(folder)))
