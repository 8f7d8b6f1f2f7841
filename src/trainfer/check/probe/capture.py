"""``trainfer.capture``: watch a model while it runs, and write what it computes into a dump.

Takes any ``nn.Module`` and a folder; gives a context manager. Inside it, forward, generate and backward calls are
recorded; at its end the hooks are gone and the dump is closed. It changes no value, gradient or random state, and
what it cannot write or understand becomes a warning and an ``incomplete`` mark, never an error of the program.
"""

import datetime
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from trainfer.check.dump.folder import claim, new_run_id, rank_folder, resolve_run_folder, rewrite
from trainfer.check.dump.records import SCHEMA, Manifest
from trainfer.check.dump.writer import DumpWriter
from trainfer.check.probe.calls import CallBook, RowSource, end_tokens_of
from trainfer.check.probe.describe import (
    describe_modules,
    library_versions,
    model_config,
    model_dtype,
    plain_value,
)
from trainfer.check.probe.gradients import GradientHooks
from trainfer.check.probe.means import MODULE_MEANS, Means
from trainfer.check.probe.names import named_modules, named_tensors
from trainfer.check.probe.sequences import check_sequences
from trainfer.check.probe.settings import CaptureSettings, check_settings, choose_modules
from trainfer.check.probe.sink import CaptureWarning, TensorSink
from trainfer.check.probe.staging import PAGE_LOCKED_LIMITS, page_locked
from trainfer.errors import CaptureError


def capture(
    model: nn.Module,
    path: str | Path,
    *,
    side: str,
    pass_name: str | None = None,
    weights_version: int | None = None,
    level: str = "L0",
    task: str = "tensor",
    backward: bool = False,
    modules: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    token_range: Sequence[int] | None = None,
    prompts_only: bool = False,
    rows: RowSource = None,
    weights: str = "fingerprint",
    max_bytes: int | None = None,
) -> "Capture":
    """Capture what a model computes; use it in a ``with`` statement.

    Args:
        model: Any module; its forward calls are the captured calls.
        path: Folder of the dump, not used before; ``{run_id}`` in it becomes a fresh run id.
        side: ``rollout`` or ``train``.
        pass_name: ``old_log_prob``, ``update`` … ; None: prefill, decode, update or forward, as read from each call.
        weights_version: Optimizer steps behind the weights at the start; None counts from 0. In-place updates of
            parameters that happen between two calls count on.
        level: ``L0`` modules, ``L1`` functions, ``mix`` both.
        task: ``tensor`` keeps values, ``statistics`` a few numbers per tensor, ``sketch`` a projection per row.
        backward: Gradients too: of inputs, outputs and parameters.
        modules: Names or patterns (``model.layers.0``, ``*.mlp``, ``model.layers.1.*``); None for all.
        steps: Steps to keep, as counted by ``Capture.step``; None for all.
        ranks: Ranks that capture; None for all.
        token_range: First position and the one after the last; rows outside are not kept.
        prompts_only: Leave out decode calls.
        rows: The rows of the calls, or a function that is asked at each call; None: read from the call.
        weights: ``fingerprint`` per parameter and buffer, or ``full`` values too.
        max_bytes: Stop keeping values after so many bytes; the dump is then incomplete.

    Raises:
        CaptureError: an argument cannot be; on leaving, that no module ever ran.
        DumpError: on entering, that the folder was used before.
    """
    settings = check_settings(
        side=side,
        pass_name=pass_name,
        weights_version=weights_version,
        level=level,
        task=task,
        backward=backward,
        modules=modules,
        steps=steps,
        ranks=ranks,
        token_range=token_range,
        prompts_only=prompts_only,
        weights=weights,
        max_bytes=max_bytes,
    )
    return Capture(model, path, settings, rows)


class _Session:
    """What an open capture holds."""

    def __init__(
        self, model: nn.Module, folder: Path, settings: CaptureSettings, rows: RowSource, means: Means
    ) -> None:
        devices = {parameter.device.type for parameter in model.parameters()}
        if "cuda" in devices:
            self.writer = DumpWriter(folder, limits=PAGE_LOCKED_LIMITS, allocate=page_locked)
        else:
            self.writer = DumpWriter(folder)
        self.sink = TensorSink(self.writer, settings)
        weights = means.weights(model, self.writer, self.sink, settings.full_weights)
        self.book = CallBook(settings, self.writer, self.sink, weights, rows, end_tokens_of(model))
        weights.write(step=0, version=self.book.weights_version)
        modules = named_modules(model)
        chosen = choose_modules(modules, settings.modules)
        self.gradients = GradientHooks(self.sink) if settings.backward else None
        if self.gradients is not None:
            self.gradients.watch_parameters(_parameters(model, chosen), self.book.gradients)
        self.hooks = means.hooks(modules, chosen, settings, self.book, self.sink, self.gradients)
        self.num_modules = len(modules)
        self.num_sequences = 0

    def close(self) -> None:
        """Take the hooks off and end the writer."""
        self.hooks.close()
        if self.gradients is not None:
            self.gradients.close()
        self.writer.close()
        self.sink.notice_failure()


class Capture:
    """An open capture; see ``capture``."""

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        settings: CaptureSettings,
        rows: RowSource,
        means: Means = MODULE_MEANS,
    ) -> None:
        self._model = model
        self._means = means
        self._settings = settings
        self._rows = rows
        self._rank, self._world_size = means.rank_and_size or _rank_and_size()
        self._leader = 0 if settings.ranks is None else settings.ranks[0]
        self._run_id = means.run_id or os.environ.get("TRAINFER_RUN_ID") or new_run_id()
        self._config: Mapping[str, object] = {}
        self._session: _Session | None = None
        self._manifest: Manifest | None = None
        self.folder = resolve_run_folder(path, self._run_id)
        """Where the dump lies."""
        choose_modules(named_modules(model), settings.modules)

    def __enter__(self) -> "Capture":
        """Claim the folder and hook the model."""
        if not self._settings.wants_rank(self._rank):
            return self
        manifest = self._first_manifest()
        try:
            claim(self.folder, manifest, leader=self._leader)
            folder = rank_folder(self.folder, self._rank)
            self._session = _Session(self._model, folder, self._settings, self._rows, self._means)
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot be written ({error.strerror}); nothing is captured, the program goes on",
                CaptureWarning,
                stacklevel=2,
            )
            return self
        self._manifest = manifest
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the dump.

        Raises:
            CaptureError: nothing was captured because no module ran; not raised over the program's own error.
        """
        session, manifest = self._session, self._manifest
        if session is None or manifest is None:
            return
        self._session = None
        if kind is not None:
            session.sink.reasons.append(f"the program raised {kind.__name__}: {str(error)[:200]}")
        empty = self._why_empty(session)
        if empty is not None:
            session.sink.reasons.append(empty)
        session.close()
        self._write_manifest(session, manifest)
        if empty is not None and kind is None:
            raise CaptureError(empty)

    def record_logprobs(
        self,
        *,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        logprobs: Sequence[Sequence[float]],
        sampling: Mapping[str, float | int] | None = None,
        request_ids: Sequence[str] | None = None,
        pass_name: str | None = None,
    ) -> None:
        """Record sequences (prompt + response, no padding) with the log-probs of their responses.

        Args:
            sequences: Token ids, ragged.
            prompt_lengths: Tokens of each prompt.
            logprobs: One natural logarithm per response token.
            sampling: temperature, top_k, top_p, min_p as applied to ``logprobs``; what is missing is no filter.
            request_ids: Names of the sequences in the program.
            pass_name: The pass that they come from; None: the last call's.

        Raises:
            CaptureError: lengths that do not fit together, or an unknown sampling key.
        """
        book = None if self._session is None else self._session.book
        records = check_sequences(
            sequences,
            prompt_lengths,
            logprobs,
            sampling or {},
            request_ids,
            first=0 if self._session is None else self._session.num_sequences,
            weights_version=0 if book is None else book.weights_version,
            step=0 if book is None else book.step,
            pass_name=pass_name or ("forward" if book is None else book.pass_name),
        )
        if self._session is not None:
            for record in records:
                self._session.writer.put(record.step, "tokens", record)
            self._session.num_sequences += len(records)
            self._session.writer.flush()

    def step(self, *, weights_version: int | None = None) -> None:
        """Go on to the program's next step; ``weights_version`` where the weights changed with it."""
        if self._session is not None:
            self._session.book.next_step(weights_version)

    def use_rows(self, rows: RowSource) -> None:
        """Name the rows of the calls that follow; None reads them from the calls again."""
        self._rows = rows
        if self._session is not None:
            self._session.book.rows = rows

    def describe_run(self, config: Mapping[str, object]) -> None:
        """Put the program's effective configuration into the manifest."""
        self._config = config

    def _why_empty(self, session: _Session) -> str | None:
        fired, count = session.hooks.fired, session.num_modules
        if session.hooks.inner_fired and len(fired) == count:
            return None
        is_compiled = any(_is_compiled(module) for module in self._model.modules())
        if session.hooks.inner_fired:
            if is_compiled:
                session.sink.incomplete(
                    f"{count - len(fired)} of {count} modules never fired, and parts of the model are compiled: "
                    "what happens inside them is not in the dump"
                )
            return None
        if fired or is_compiled:
            return (
                f"{len(fired)} of {count} modules fired: the model was compiled before the capture began, and compiled "
                "code runs no hooks; capture first and compile inside, or capture the eager model"
            )
        return (
            f"0 of {count} modules fired: no forward call of the captured model happened inside the capture; hand over "
            "the module that is called"
        )

    def _first_manifest(self) -> Manifest:
        model = self._model
        return Manifest(
            schema=SCHEMA,
            side=self._settings.side,
            run_id=self._run_id,
            launch_id=_launch_id(self._world_size, self._run_id),
            rank=self._rank,
            world_size=self._world_size,
            ranks=self._settings.ranks,
            created=_now(),
            finished=None,
            complete=False,
            incomplete_reasons=(),
            capture=self._settings.as_json(),
            config={},
            model_class=type(model).__name__,
            model_config=model_config(model),
            model_dtype=model_dtype(model),
            modules=describe_modules(named_modules(model), model),
            versions=library_versions(),
            seed=torch.initial_seed(),
            counts={},
        )

    def _write_manifest(self, session: _Session, manifest: Manifest) -> None:
        counts = {
            "calls": session.book.num_calls,
            "records": session.sink.num_records,
            "sequences": session.num_sequences,
            "modules": session.num_modules,
            "modules_fired": len(session.hooks.fired),
            "deduplicated": session.sink.deduplicated,
            "without_rows": session.sink.without_rows,
            "bytes": session.writer.bytes_written,
            **session.book.counts,
        }
        final = msgspec.structs.replace(
            manifest,
            finished=_now(),
            complete=not session.sink.reasons,
            incomplete_reasons=tuple(session.sink.reasons),
            counts=counts,
            config={key: plain_value(value) for key, value in self._config.items()},
        )
        try:
            rewrite(self.folder, final, leader=self._leader)
        except OSError as error:
            session.sink.incomplete(f"the manifest could not be written ({error.strerror})")


def _parameters(model: nn.Module, chosen: set[str]) -> dict[str, tuple[str, str, nn.Parameter]]:
    names = named_tensors(model)
    return {
        name: (*names[name], parameter)
        for name, parameter in model.named_parameters()
        if names[name][0] in chosen
    }


def _is_compiled(module: nn.Module) -> bool:
    attributes = vars(module)
    return "_orig_mod" in attributes["_modules"] or attributes.get("_compiled_call_impl") is not None


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _launch_id(world_size: int, run_id: str) -> str:
    """The same on all ranks of a launch, another one after a restart."""
    if world_size == 1:
        return run_id
    parts = [
        os.environ.get(name, "")
        for name in ("TRAINFER_RUN_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    ]
    return ":".join(parts)


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
