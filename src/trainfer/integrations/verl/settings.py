"""What ``trainfer attach`` was asked for, as it travels to every process of the run: JSON in one environment variable.

Takes checked values; gives a frozen record. No torch, nothing of verl.
"""

import os
from pathlib import Path

import msgspec

from trainfer.errors import CaptureError

VARIABLE = "TRAINFER_ATTACH"
PASSES = ("old_log_prob", "ref_log_prob", "update")
"""Training passes that can be captured; the rollout always is."""


class AttachSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one attached run."""

    out: str
    """Absolute folder of everything that is written."""
    verl: str
    """Version that the tables are chosen by."""
    run_id: str
    steps: tuple[int, ...] | None = (0, 1)
    """Steps of this run, counted from 0; None for all."""
    passes: tuple[str, ...] = PASSES
    prompts_only: bool = False
    task: str = "tensor"
    max_bytes: int | None = None
    """Of one process, step and pass."""

    def wants_step(self, step: int) -> bool:
        """True where this step is captured."""
        return self.steps is None or step in self.steps

    def encode(self) -> str:
        """For the environment."""
        return msgspec.json.encode(self).decode()

    @property
    def folder(self) -> Path:
        """``out`` as a path."""
        return Path(self.out)

    def pass_folder(self, step: int, pass_name: str) -> Path:
        """Where a dump of one training pass of one step lies.

        With ``prompts_only`` the recipe's names: ``update_actor/step_0``.
        """
        if self.prompts_only and pass_name == "update":
            return self.folder / "update_actor" / f"step_{step}"
        return self.folder / f"step_{step}" / pass_name

    def rollout_folder(self, step: int) -> Path:
        """Where the dumps of one step's rollout lie, one a process."""
        if self.prompts_only:
            return self.folder / "generate_sequences" / f"step_{step}"
        return self.folder / f"step_{step}" / "rollout"


def from_environment() -> AttachSettings | None:
    """The settings of this run; None where nothing is attached.

    Raises:
        CaptureError: the variable does not hold settings.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=AttachSettings)
    except msgspec.DecodeError as error:
        raise CaptureError(
            f"{VARIABLE}={text[:200]!r} holds no settings ({error}); trainfer attach sets it"
        ) from error
