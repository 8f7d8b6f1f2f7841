"""``CaptureCallback``: chosen steps of TRL's GRPOTrainer, what was generated against what scored it.

    trainer = GRPOTrainer(..., callbacks=[CaptureCallback("dumps", steps=[0])])

Takes a folder; gives ``dumps/step_0/rollout`` and ``dumps/step_0/train``, and, where one process trains, their comparison
in ``dumps/step_0/report``. Covers completions that Transformers' ``generate`` makes. Completions of vLLM or of Transformers'
continuous batching come from elsewhere: then the training side is captured alone, and it is said.
"""
# ruff: noqa: ARG002 (Transformers hands every event the same arguments)

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainfer.check.compare.source import DumpSide
from trainfer.check.diagnose import Diagnosis, diagnose
from trainfer.check.probe.settings import CaptureSettings, check_settings
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError, TrainferError
from trainfer.integrations.trl.step import CapturedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What is read of a ``GRPOConfig``."""

    sampling: Mapping[str, float | int]
    """Of what is generated, in the words of a capture."""
    beta: float
    generator: str
    """Who makes the completions, where it is not the model's ``generate``; else empty."""

    @classmethod
    def read(cls, args: TrainingArguments) -> "_Asked":
        """Read the trainer's arguments.

        Raises:
            CaptureError: they are not those of a GRPOTrainer.
        """
        given = vars(args)
        missing = [name for name in ("temperature", "top_p", "use_vllm", "beta") if name not in given]
        if missing:
            raise CaptureError(
                f"{type(args).__name__} has no {', '.join(missing)}: CaptureCallback is for TRL's GRPOTrainer; any other "
                "loop is captured by trainfer.capture"
            )
        continuous = given.get("use_transformers_continuous_batching")
        return cls(
            sampling={
                "temperature": given["temperature"],
                "top_p": given["top_p"],
                "top_k": given.get("top_k") or -1,
                "min_p": given.get("min_p") or 0.0,
            },
            beta=given["beta"],
            generator="vLLM" if given["use_vllm"] else "continuous batching" if continuous else "",
        )


class CaptureCallback(TrainerCallback):
    """Captures chosen steps of a GRPOTrainer, and compares their two sides."""

    def __init__(
        self,
        path: str | Path,
        *,
        steps: Sequence[int] = (0,),
        task: str = "tensor",
        modules: Sequence[str] | None = None,
        weights: str = "fingerprint",
        max_bytes: int | None = None,
        compare_steps: bool = True,
        tell: Callable[[str], None] = print,
    ) -> None:
        """Check the arguments; the model comes with the first step.

        Args:
            path: Folder for ``step_N``; those of the chosen steps must not be there yet.
            steps: Optimizer steps, counted from 0 (``state.global_step`` before the step).
            task: ``tensor``, ``statistics`` or ``sketch``.
            modules: Names or patterns; None for all.
            weights: ``fingerprint``, or ``full``: `trainfer compare` then has a model to replay with.
            max_bytes: Stop keeping values of a side after so many bytes.
            compare_steps: False leaves it to ``trainfer compare``.
            tell: Where the line about each step goes, in the first process.

        Raises:
            CaptureError: an argument cannot be.
        """
        self.path = Path(path)
        self.results: dict[int, Diagnosis] = {}
        """By step, where the sides were compared."""
        self._steps = frozenset(steps)
        self._compare_steps = compare_steps
        self._tell = tell
        self._open: CapturedStep | None = None
        self._settings = partial(
            check_settings, pass_name=None, level="L0", task=task, backward=False, modules=modules, steps=None,
            ranks=None, token_range=None, prompts_only=False, weights=weights, max_bytes=max_bytes,
        )  # fmt: skip
        self._settings(side="train", weights_version=0)
        if not self._steps or min(self._steps) < 0:
            raise CaptureError(f"steps={list(steps)!r}: name optimizer steps from 0 on, at least one")

    def on_train_begin(  # noqa: D102
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **_: object,
    ) -> None:
        ahead = sorted(step for step in self._steps if step >= state.global_step)
        used = [step for step in ahead if (self.path / f"step_{step}").exists()]
        if used and args.process_index == 0:
            raise CaptureError(
                f"{self.path}/step_{used[0]} is there already; name another folder, or take it away"
            )
        asked = _Asked.read(args)
        if asked.beta != 0 and _has_adapter(model):
            raise CaptureError(
                f"beta={asked.beta} with an adapter: TRL then scores the reference in the model that is trained, and its "
                "rows cannot be told from the policy's; set beta=0 for captured runs"
            )
        if asked.generator:
            warnings.warn(
                f"{asked.generator} makes the completions, outside the model that is trained: the training side is captured "
                "alone. vLLM is captured by TRAINFER_CAPTURE (page: Attach anything), then `trainfer compare`",
                CaptureWarning,
                stacklevel=2,
            )

    def on_step_begin(  # noqa: D102
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **_: object,
    ) -> None:
        step = state.global_step
        if step not in self._steps or self._open is not None:
            return

        def settings(side: str) -> CaptureSettings:
            return self._settings(side=side, weights_version=step)

        self._open = CapturedStep(
            model,
            self.path / f"step_{step}",
            settings,
            sampling=_Asked.read(args).sampling,
            run={"trl": True, "step": step},
        )

    def on_pre_optimizer_step(  # noqa: D102
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        for problem in opened.close():
            warnings.warn(problem, CaptureWarning, stacklevel=2)
        if args.process_index == 0:
            self._tell(self._judge(state.global_step, opened, args))

    def on_train_end(  # noqa: D102
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        opened, self._open = self._open, None
        for problem in opened.close() if opened is not None else []:
            warnings.warn(problem, CaptureWarning, stacklevel=2)

    def _judge(self, step: int, opened: CapturedStep, args: TrainingArguments) -> str:
        """Compare a step's sides, where there are two; gives the line to tell."""
        line = f"trainfer step {step}: "
        if not opened.generated:
            why = _Asked.read(args).generator or "TRL scored completions of an earlier step"
            return f"{line}nothing was generated in the model ({why}); the training side is in {opened.train_folder}"
        if not self._compare_steps or args.world_size > 1:
            return f"{line}captured; `trainfer compare {opened.rollout_folder} {opened.train_folder}` compares it"
        try:
            result = diagnose(DumpSide(opened.rollout_folder), DumpSide(opened.train_folder))
            report = result.write(opened.rollout_folder.parent / "report")
        except TrainferError as error:
            return f"{line}captured, not compared: {error}"
        self.results[step] = result
        return f"{line}{_in_words(result)}: {report / 'report.html'}"


def _has_adapter(model: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(model).__mro__)


def _in_words(result: Diagnosis) -> str:
    coverage = result.comparison.coverage
    words = f"{result.verdict} ({coverage.rows_matched} rows matched of {coverage.rows_rollout})"
    first = result.first_divergence
    if first is not None:
        words += f", first in {first.module or first.stage}"
    causes = ", ".join(cause.cause for cause in result.causes)
    return f"{words}, {causes}" if causes else words
