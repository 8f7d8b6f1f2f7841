"""An open capture of one vLLM worker: the runner's steps -> a dump of the worker's rank.

Takes a model runner (``GPUModelRunner`` and ``CPUModelRunner`` of vLLM's V1 engine, and the newer
``worker.gpu.model_runner``) and settings. Nothing of the runner's class is changed: the methods that are watched are
covered on the object, and uncovered at the end. Warm-up, profiling and dummy runs call the model without a schedule,
and are not captured. Whatever goes wrong in here ends the capture with a warning and an ``incomplete`` mark; vLLM
goes on.

A captured step runs eagerly: compiled code and CUDA graphs run no hooks, so vLLM is told to leave them
for these steps (``skip_compiled``). Steps that are not captured run as they always do.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainfer.check.probe.capture import Capture, Means
from trainfer.check.probe.given import Rows
from trainfer.check.probe.settings import CaptureSettings, check_settings
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError
from trainfer.integrations.vllm.answers import Answer, Answers
from trainfer.integrations.vllm.hooks import StepHooks
from trainfer.integrations.vllm.schedule import Scheduled, last_rows, read_schedule, rows_of
from trainfer.integrations.vllm.settings import VllmCaptureSettings
from trainfer.integrations.vllm.weights import EffectiveWeights


class WorkerCapture:
    """One capture; ``close`` ends it."""

    def __init__(
        self, runner: Any, settings: VllmCaptureSettings, *, replica: int = 0, step: int = 0
    ) -> None:
        """Begin. ``replica``: which of ``settings.replicas``.

        Raises:
            CaptureError: a setting cannot be.
            DumpError: the folder was used before.
        """
        self.settings = settings
        self._runner = runner
        self._model = runner.get_model()
        self._checked = _checked(settings)
        self._now: Scheduled | None = None
        self._order: list[str] = []
        self._ids: list[int] = []
        self._known: set[str] = set()
        self._has_run = self._is_closed = False
        self._problem: str | None = None
        self._hooks: StepHooks | None = None
        self._weights: EffectiveWeights | None = None
        self._covered: list[tuple[object, str]] = []
        self._prompts: set[tuple[int, ...]] = set()
        mode = runner.model_config.logprobs_mode
        self._answers = Answers(mode if isinstance(mode, str) else mode.value)
        self.rank, self.size = _rank_and_size(settings, replica)
        means = Means(
            hooks=self._make_hooks,
            weights=self._make_weights,
            rank_and_size=(self.rank, self.size),
            run_id=settings.run_id,
        )
        self.capture = Capture(self._model, settings.path, self._checked, self._rows, means)
        self.capture.describe_run({**settings.config, "vllm": _engine_config(runner)})
        self.step_number = step
        with torch.inference_mode(mode=False):
            self.capture.__enter__()
        self._cover_runner()

    @property
    def wants_now(self) -> bool:
        """True where the step that runs is captured."""
        return self._problem is None and self._checked.wants_step(self.step_number)

    @property
    def is_first_shard(self) -> bool:
        """True on the worker that records what was sampled."""
        return _tensor_parallel()[0] == 0

    def next_step(self, weights_version: int | None = None) -> None:
        """The program goes on to its next step."""
        self._write_answers(self._answers.rest())
        self.step_number += 1
        self.capture.step(weights_version=weights_version)

    def record(self, answers: list[Answer], pass_name: str | None = None) -> None:
        """Put sequences and log-probs beside what was captured."""
        by_sampling: dict[tuple[tuple[str, float | int], ...], list[Answer]] = {}
        for answer in answers:
            by_sampling.setdefault(tuple(answer.sampling.items()), []).append(answer)
        for sampling, members in by_sampling.items():
            self.capture.record_logprobs(
                sequences=[[*member.prompt, *member.tokens] for member in members],
                prompt_lengths=[len(member.prompt) for member in members],
                logprobs=[member.logprobs for member in members],
                sampling=dict(sampling),
                request_ids=[member.request for member in members],
                pass_name=pass_name,
            )

    def close(self) -> None:
        """End the capture and leave the runner as it was; a second time does nothing.

        Raises:
            CaptureError: no real step ran inside it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for owner, name in self._covered:
            vars(owner).pop(name, None)
        self._covered.clear()
        self.guarded(lambda: self._write_answers(self._answers.rest()))
        failure = None if self._problem is None else RuntimeError(self._problem)
        self.capture.__exit__(None if failure is None else type(failure), failure, None)

    def guarded(self, work: Callable[[], None]) -> None:
        """Do it; an error ends the capture, not the run."""
        if self._problem is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user's engine must not die of being watched
            self._problem = f"the capture inside vLLM failed: {type(error).__name__}: {str(error)[:300]}"
            warnings.warn(f"{self._problem}; vLLM goes on", CaptureWarning, stacklevel=2)

    def starts(self, token_ids: Tensor | None) -> list[int] | None:
        """The model is called; see ``hooks.Step``."""
        step = self._now
        if step is None or token_ids is None:
            return None
        has_new_weights = self._weights is not None and self._weights.pending
        if has_new_weights and self._has_run and self.settings.advance == "weights":
            self.next_step()
        self._has_run = True
        if not self.wants_now:
            self._known.clear()
            return None
        self._order = self._request_order(step)
        self._ids = token_ids.detach().to(device="cpu", dtype=torch.int64).tolist()
        _run_eagerly()
        return last_rows(step, self._order)

    def _rows(self) -> Rows | None:
        step = self._now
        assert step is not None
        rows = rows_of(
            step, self._order, self._ids, known=self._known.__contains__, earlier=self._earlier_tokens
        )
        if rows is not None:
            self._known.update(self._order)
        return rows

    def _earlier_tokens(self, request: str, count: int) -> list[int] | None:
        """From the runner's own copy of the batch, where it has one."""
        batch = vars(self._runner).get("input_batch")
        if batch is None:
            return None
        tokens = batch.token_ids_cpu[batch.req_id_to_index[request], :count].tolist()
        return None if min(tokens, default=0) < 0 else tokens

    def _request_order(self, step: Scheduled) -> list[str]:
        batch = vars(self._runner).get("input_batch")
        if batch is not None:
            return [request for request in batch.req_ids if request in step.scheduled]
        return self._order

    def _make_hooks(self, *arguments: Any) -> StepHooks:
        self._hooks = StepHooks(*arguments, step=self)
        return self._hooks

    def _make_weights(self, model: Any, writer: Any, sink: Any, full: bool) -> EffectiveWeights:  # noqa: FBT001
        assert not full
        reader = self.settings.weights_from
        rank, size = _tensor_parallel()
        self._weights = EffectiveWeights(model, writer, sink, reader=reader, rank=rank, size=size)
        return self._weights

    def _cover_runner(self) -> None:
        runner = self._runner
        self._cover(runner, "execute_model", self._execute)
        self._cover(runner, "sample_tokens", self._sample)
        self._cover(runner, "_dummy_run", self._dummy)
        self._cover(runner, "prepare_inputs", self._prepare)
        self._cover(runner, "_determine_batch_execution_and_padding", self._dispatch)
        self._cover(runner, "shutdown", self._shut_down)
        for owner, name in ((runner, "reload_weights"), (self._model, "load_weights")):
            self._cover(owner, name, self._load)

    def _cover(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        method = getattr(owner, name, None)
        if method is not None:
            covered = functools.wraps(method)(functools.partial(by, method))
            object.__setattr__(owner, name, covered)
            self._covered.append((owner, name))

    def _execute(self, method: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        is_dummy = (args[1] if len(args) > 1 else kwargs.get("dummy_run", False)) is True
        if not is_dummy:
            self.guarded(lambda: self._schedule(scheduler_output))
        if self._now is not None and self.wants_now and "is_profile" in inspect.signature(method).parameters:
            kwargs.setdefault("is_profile", True)  # of a real step it only says: no CUDA graph
        try:
            output = method(scheduler_output, *args, **kwargs)
        finally:
            self._now = None
        if output is not None or (self._hooks is not None and self._hooks.has_logits):
            self._end_step()
        return self._watch_output(output)

    def _sample(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            output = method(*args, **kwargs)
        finally:
            self._end_step()
        return self._watch_output(output)

    def _dummy(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now, self._now = self._now, None
        try:
            return method(*args, **kwargs)
        finally:
            self._now = now

    def _prepare(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Of the newer runner, which keeps no batch: the order of the requests."""
        batch = method(*args, **kwargs)
        if self._now is not None:
            self._order = [request for request in batch.req_ids if request in self._now.scheduled]
        return batch

    def _dispatch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._now is not None and self.wants_now and "force_eager" in inspect.signature(method).parameters:
            kwargs["force_eager"] = True
        return method(*args, **kwargs)

    def _load(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._weights is not None:
            self._weights.notice_load()
        return method(*args, **kwargs)

    def _shut_down(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            self.close()
        except CaptureError as error:
            warnings.warn(f"the capture of vLLM: {error}", CaptureWarning, stacklevel=2)
        return method(*args, **kwargs)

    def _schedule(self, scheduler_output: Any) -> None:
        self._now = step = read_schedule(scheduler_output)
        self._known.difference_update(step.finished)
        self._write_answers(self._answers.begin(step))
        if not step.scheduled:
            self._now = None

    def _end_step(self) -> None:
        if self._hooks is not None:
            self.guarded(self._hooks.end_step)

    def _watch_output(self, output: Any) -> Any:
        """Take what was sampled, now or once it is there."""
        if output is None or not self.settings.record or not self.is_first_shard:
            return output
        if hasattr(output, "sampled_token_ids"):
            self.guarded(lambda: self._answers.take(output))
        elif hasattr(output, "get_output"):
            get_output = output.get_output

            def taken() -> Any:
                result = get_output()
                self.guarded(lambda: self._answers.take(result))
                return result

            output.get_output = taken
        return output

    def _write_answers(self, answers: list[Answer]) -> None:
        if not self.settings.record or not self._checked.wants_step(self.step_number):
            return
        if self._checked.prompts_only:
            prompts = [answer for answer in answers if answer.prompt not in self._prompts]
            unique = {answer.prompt: answer for answer in prompts}
            self._prompts.update(unique)
            self.record(
                [Answer(request=a.request, prompt=a.prompt, sampling=a.sampling) for a in unique.values()],
                "prefill",
            )
        else:
            self.record([answer for answer in answers if answer.tokens and answer.is_whole], "decode")


def _checked(settings: VllmCaptureSettings) -> CaptureSettings:
    return check_settings(
        side="rollout",
        pass_name=None,
        weights_version=settings.weights_version,
        level="L0",
        task=settings.task,
        backward=False,
        modules=settings.modules,
        steps=settings.steps,
        ranks=None,
        token_range=settings.token_range,
        prompts_only=settings.prompts_only,
        weights="fingerprint",
        max_bytes=settings.max_bytes,
    )


def _rank_and_size(settings: VllmCaptureSettings, replica: int) -> tuple[int, int]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return replica * size + rank, settings.replicas * size


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def _engine_config(runner: Any) -> dict[str, object]:
    """What of vLLM's configuration decides numbers."""
    config = runner.vllm_config
    return {
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "dtype": str(config.model_config.dtype),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "captured_steps_run_eagerly": True,
    }


def _run_eagerly() -> None:
    """Leave compiled code for this forward: it runs no hooks."""
    from vllm import forward_context  # pyright: ignore[reportMissingImports]

    context = vars(forward_context)["_forward_context"]  # what 0.11 lacks a question for
    if context is not None and hasattr(context, "skip_compiled"):
        context.skip_compiled = True
