"""One captured step of a GRPOTrainer: a dump of what ``generate`` computed, and one of what scored it.

Takes the trainer's model; gives the folders ``rollout`` and ``train``. While the step lasts the model's ``generate`` is
wrapped: inside it the rollout's hooks are on, outside it those of training, so that steps which generate and score by
turns come out right. Passes of another module (a reference model) are not seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from trainfer.check.probe.capture import Capture
from trainfer.check.probe.means import Means
from trainfer.check.probe.settings import CaptureSettings
from trainfer.errors import CaptureError
from trainfer.integrations.trl.sampled import ScoreReader, sampled, scores_read_by
from trainfer.integrations.trl.switched import SwitchedHooks

Sampling = Mapping[str, float | int]
IGNORED_LABEL = -100


@runtime_checkable
class GeneratesBatches(Protocol):
    """A model with Transformers' continuous batching."""

    def generate_batch(self, *args: object, **kwargs: object) -> object:
        """Completions of many prompts."""
        ...


@dataclass(slots=True)
class _Side:
    """An open capture and its switch."""

    capture: Capture
    hooks: list[SwitchedHooks] = field(default_factory=list[SwitchedHooks])

    def switch(self, *, on: bool) -> None:
        for hooks in self.hooks:
            hooks.on() if on else hooks.off()


class CapturedStep:
    """A step that is being captured, from its first micro-batch until just before the optimizer's step."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        settings: Callable[[str], CaptureSettings],
        *,
        sampling: Sampling,
        run: Mapping[str, object],
    ) -> None:
        """Hook the model.

        Args:
            model: What generates and trains.
            folder: Of the step; ``rollout`` and ``train`` come below it.
            settings: Those of a side, by its name.
            sampling: temperature, top_k, top_p, min_p of what is generated; training scores with the temperature alone.
            run: For the manifests.
        """
        self.rollout_folder, self.train_folder = folder / "rollout", folder / "train"
        self._model = model
        self._settings = settings
        self._sampling = dict(sampling)
        self._run = run
        self._rollout: _Side | None = None
        self._train = self._open("train", self.train_folder)
        self._train.switch(on=True)
        self._is_generating = False
        self._generate: Callable[..., object] = model.generate  # type: ignore[assignment]
        vars(model)["generate"] = self._watched_generate
        if isinstance(model, GeneratesBatches):
            self._generate_batch = model.generate_batch
            vars(model)["generate_batch"] = self._unwatched_batch
        self._scores = model.register_forward_hook(self._after_forward, with_kwargs=True)

    @property
    def generated(self) -> bool:
        """True where ``generate`` ran in this step."""
        return self._rollout is not None

    def close(self, error: BaseException | None = None) -> list[str]:
        """Take everything off and close the dumps; gives what went wrong, in words."""
        for name in ("generate", "generate_batch"):
            vars(self._model).pop(name, None)
        self._scores.remove()
        problems: list[str] = []
        for side in (self._rollout, self._train):
            try:
                if side is not None:
                    side.capture.__exit__(None if error is None else type(error), error, None)
            except CaptureError as problem:
                problems.append(f"{side.capture.folder if side else ''}: {problem}")
        return problems

    def _open(self, name: str, folder: Path) -> _Side:
        made: list[SwitchedHooks] = []

        def hooks(*arguments: object) -> SwitchedHooks:
            made.append(SwitchedHooks(*arguments))  # type: ignore[arg-type]
            return made[-1]

        capture = Capture(self._model, folder, self._settings(name), None, Means(hooks=hooks))
        capture.describe_run(self._run)
        capture.__enter__()
        return _Side(capture=capture, hooks=made)

    def _watched_generate(self, *args: object, **kwargs: object) -> object:
        if self._rollout is None:
            self._rollout = self._open("rollout", self.rollout_folder)
        reader = ScoreReader()
        self._turn(generating=True)
        try:
            with scores_read_by(reader, self._model):
                drawn = self._generate(*args, **kwargs)
        finally:
            self._turn(generating=False)
        prompts = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(prompts, Tensor) and isinstance(drawn, Tensor):
            mask = cast("Tensor | None", kwargs.get("attention_mask"))
            found = sampled(prompts, mask, drawn, reader, self._end_tokens(kwargs.get("generation_config")))
            self._rollout.capture.record_logprobs(
                sequences=found.sequences,
                prompt_lengths=found.prompt_lengths,
                logprobs=found.logprobs,
                sampling=self._sampling,
            )
        return drawn

    def _unwatched_batch(self, *args: object, **kwargs: object) -> object:
        """Continuous batching packs rows in an order of its own: nothing is captured, least of all as training."""
        self._train.switch(on=False)
        self._is_generating = True
        try:
            return self._generate_batch(*args, **kwargs)
        finally:
            self._is_generating = False
            self._train.switch(on=True)

    def _turn(self, *, generating: bool) -> None:
        assert self._rollout is not None
        self._is_generating = generating
        self._train.switch(on=not generating)
        self._rollout.switch(on=generating)

    def _end_tokens(self, asked: object) -> Sequence[int]:
        """Of the generation config that was handed over, else the model's."""
        for config in (asked, vars(self._model).get("generation_config")):
            ids = None if config is None else vars(config).get("eos_token_id")
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
        return []

    def _after_forward(
        self, _module: nn.Module, _args: object, kwargs: Mapping[str, object], output: object
    ) -> None:
        """Record what a scoring forward gave: TRL's models return ``log_probs`` where labels ask for them."""
        labels, ids, mask = kwargs.get("labels"), kwargs.get("input_ids"), kwargs.get("attention_mask")
        scores = (
            cast("Mapping[str, object]", output).get("log_probs") if isinstance(output, Mapping) else None
        )
        tensors = [item for item in (labels, ids, mask, scores) if isinstance(item, Tensor)]
        if self._is_generating or len(tensors) < 4:
            return
        sequences: list[list[int]] = []
        logprobs: list[list[float]] = []
        for labels_T, ids_T, mask_T, scores_T in zip(*(tensor.detach() for tensor in tensors), strict=True):
            sequences.append(ids_T[mask_T.bool()].tolist())
            logprobs.append(scores_T[labels_T[1:] != IGNORED_LABEL].float().tolist())
        self._train.capture.record_logprobs(
            sequences=sequences,
            prompt_lengths=[len(ids) - len(own) for ids, own in zip(sequences, logprobs, strict=True)],
            logprobs=logprobs,
            sampling={"temperature": self._sampling.get("temperature", 1.0)},
            pass_name="update" if torch.is_grad_enabled() else "old_log_prob",
        )
