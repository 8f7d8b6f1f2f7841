"""What a capture was asked to do, checked before anything is touched.

Takes the arguments of ``capture``; gives one frozen record or an error that names the value, the rule and
the remedy. Decides which steps, ranks and modules are wanted.
"""

import difflib
import enum
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainfer.check.dump.folder import is_pass_name
from trainfer.check.dump.records import Task
from trainfer.errors import CaptureError

SIDES = ("rollout", "train")
WEIGHTS = ("fingerprint", "full")


class Level(enum.Enum):
    """What is watched."""

    MODULES = "L0"
    FUNCTIONS = "L1"
    MIX = "mix"

    @property
    def modules(self) -> bool:
        """True where modules are recorded."""
        return self is not Level.FUNCTIONS

    @property
    def functions(self) -> bool:
        """True where functions are recorded."""
        return self is not Level.MODULES


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSettings:
    """Checked arguments of ``capture``; None stands for no limit."""

    side: str
    pass_name: str | None
    weights_version: int | None
    level: Level
    task: Task
    backward: bool
    modules: tuple[str, ...] | None
    steps: frozenset[int] | None
    ranks: tuple[int, ...] | None
    token_range: tuple[int, int] | None
    """Positions, the last one excluded."""
    prompts_only: bool
    full_weights: bool
    max_bytes: int | None

    @property
    def filters_rows(self) -> bool:
        """True where only some rows of each tensor are kept."""
        return self.token_range is not None or self.prompts_only

    def wants_step(self, step: int) -> bool:
        """True where this step is captured."""
        return self.steps is None or step in self.steps

    def wants_rank(self, rank: int) -> bool:
        """True where this rank captures."""
        return self.ranks is None or rank in self.ranks

    def as_json(self) -> dict[str, object]:
        """For the manifest."""
        return {
            "pass_name": self.pass_name,
            "weights_version": self.weights_version,
            "level": self.level.value,
            "task": self.task.value,
            "backward": self.backward,
            "modules": self.modules,
            "steps": None if self.steps is None else sorted(self.steps),
            "ranks": self.ranks,
            "token_range": self.token_range,
            "prompts_only": self.prompts_only,
            "weights": WEIGHTS[self.full_weights],
            "max_bytes": self.max_bytes,
        }


def check_settings(
    *,
    side: str,
    pass_name: str | None,
    weights_version: int | None,
    level: str,
    task: str,
    backward: bool,
    modules: Sequence[str] | None,
    steps: Sequence[int] | None,
    ranks: Sequence[int] | None,
    token_range: Sequence[int] | None,
    prompts_only: bool,
    weights: str,
    max_bytes: int | None,
) -> CaptureSettings:
    """Check the arguments of ``capture``.

    Raises:
        CaptureError: one of them cannot be.
    """
    _one_of("side", side, SIDES)
    _one_of("level", level, [member.value for member in Level])
    _one_of("task", task, [member.value for member in Task])
    _one_of("weights", weights, WEIGHTS)
    if pass_name is not None and not is_pass_name(pass_name):
        raise CaptureError(
            f"pass_name={pass_name!r}: a pass becomes part of a file name, so it is 1 to 64 letters, digits or "
            "underscores, for example 'old_log_prob'"
        )
    for name, numbers in (("steps", steps), ("ranks", ranks)):
        if numbers is not None and (not numbers or min(numbers) < 0):
            raise CaptureError(f"{name}={list(numbers)!r}: name numbers from 0 on, or None for all")
    if weights_version is not None and weights_version < 0:
        raise CaptureError(f"weights_version={weights_version}: it counts optimizer steps, from 0 on")
    if max_bytes is not None and max_bytes <= 0:
        raise CaptureError(f"max_bytes={max_bytes}: give a number of bytes above 0, or None for no limit")
    return CaptureSettings(
        side=side,
        pass_name=pass_name,
        weights_version=weights_version,
        level=Level(level),
        task=Task(task),
        backward=backward,
        modules=None if modules is None else tuple(modules),
        steps=None if steps is None else frozenset(steps),
        ranks=None if ranks is None else tuple(sorted(set(ranks))),
        token_range=_check_range(token_range),
        prompts_only=prompts_only,
        full_weights=weights == "full",
        max_bytes=max_bytes,
    )


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise CaptureError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, allowed))}")


def _check_range(token_range: Sequence[int] | None) -> tuple[int, int] | None:
    if token_range is None:
        return None
    if len(token_range) != 2 or not 0 <= token_range[0] < token_range[1]:
        raise CaptureError(
            f"token_range={tuple(token_range)!r}: give the first position and the one after the last, "
            "for example (0, 128)"
        )
    return (token_range[0], token_range[1])


def choose_modules(names: Iterable[str], patterns: Sequence[str] | None) -> set[str]:
    """The names that some pattern matches (``model.layers.0``, ``*.mlp``, ``model.layers.1.*``); all without patterns.

    Raises:
        CaptureError: a pattern matches nothing.
    """
    known = list(names)
    if patterns is None:
        return set(known)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(known, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern, known, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise CaptureError(f"modules: {pattern!r} matches none of the model's {len(known)} modules{hint}")
        chosen.update(matched)
    return chosen
