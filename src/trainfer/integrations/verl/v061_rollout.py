"""What runs around the rollout of verl 0.6.1: its weights are proven, and vLLM's worker is captured between its two modes.

Trainer and vLLM's worker share a process. ``rollout_mode`` sends the weights; what follows until ``trainer_mode`` is one step's
rollout, captured from within by trainfer's vLLM adapter, which also writes what was sampled. A step begins where other weights are
sent: their version counts the actor's updates, so that a validation, which syncs too, begins none.
"""

import pkgutil
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainfer.check.dump.records import Role, WeightRecord
from trainfer.check.dump.tensors import DTYPE_NAMES
from trainfer.exact.fingerprint import fingerprint
from trainfer.integrations.verl.bare_dump import BareDump
from trainfer.integrations.verl.session import Session, session
from trainfer.integrations.verl.sync_proof import rollout_weights
from trainfer.integrations.verl.v061_train import updates_done
from trainfer.integrations.verl.wrapping import Call

Steps = Generator[None, Any, None]
_VLLM = "trainfer.integrations.vllm"


class _Rollout:
    """What this process knows of its rollout."""

    is_validation = False
    is_open = False
    opened: ClassVar[set[int]] = set()
    """Steps whose rollout was captured."""


def generate(call: Call) -> Steps:
    """``generate_sequences`` (mode sync): a validation's is not captured."""
    _Rollout.is_validation = bool(call.argument("prompts").meta_info.get("validate", False))
    try:
        yield
    finally:
        _Rollout.is_validation = False


def validate(call: Call) -> Steps:
    """``RayPPOTrainer._validate``, in the driver: the workers are told through a file, since nothing else reaches them."""
    del call
    mark = _validation_mark(session())
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _validation_mark(state: Session) -> Path:
    return state.settings.folder / "processes" / "validating"


def weights_sent(call: Call) -> Steps:
    """``update_weights`` of the rollout: every weight is fingerprinted on its way, whole, as it is sent."""
    state = session()
    if call.kwargs.get("peft_config"):
        yield
        return
    state.synced(updates_done())
    name = "weights" if "weights" in call.kwargs else None
    sent = call.kwargs["weights"] if name else call.args[1]
    watched = _fingerprinted(state, sent, str(call.owner.config.dtype))
    if name:
        call.kwargs["weights"] = watched
    else:
        call.args = (call.args[0], watched, *call.args[2:])
    yield
    if dist.get_rank() == 0:
        _sent_dump().mark()


def _fingerprinted(
    state: Session, weights: Iterable[tuple[str, Tensor]], dtype: str
) -> Iterator[tuple[str, Tensor]]:
    target = vars(torch).get(dtype.removeprefix("torch."))
    for name, tensor in weights:
        if dist.get_rank() == 0:
            try:
                _put_sent(state, name, tensor, target)
            except Exception as error:  # noqa: BLE001 (a probe never stops the run)
                state.journal.problem(f"{name} has no fingerprint: {type(error).__name__}: {error}")
        yield name, tensor


def _put_sent(state: Session, name: str, tensor: Tensor, target: object) -> None:
    value = tensor.detach()
    if isinstance(target, torch.dtype) and value.is_floating_point():
        value = value.to(target)
    record = WeightRecord(
        name=name,
        module=name.rpartition(".")[0],
        role=Role.PARAMETER,
        dtype=DTYPE_NAMES[value.dtype],
        shape=tuple(value.shape),
        fingerprint=fingerprint(value),
        weights_version=state.step,
        requires_grad=True,
    )
    _sent_dump().put(record, step=state.step, pass_name="weights")


@cache
def _sent_dump() -> BareDump:
    settings = session().settings
    return BareDump(
        settings.folder / "weights" / "train",
        side="train",
        run_id=settings.run_id,
        config={"verl": settings.verl, "attached": True},
    )


def rollout_mode(call: Call) -> Steps:
    """``rollout_mode``: vLLM has the weights now, and generates next."""
    yield
    state = session()
    worker = _vllm_worker(call.owner.rollout)
    if worker is None:
        state.journal.problem(
            f"{type(call.owner.rollout).__name__} has no vLLM worker: the rollout is not captured"
        )
        return
    if getattr(call.owner, "_is_lora", False):
        state.journal.problem("the weights of a LoRA actor are not proven after a sync in verl 0.6.1")
    else:
        rollout_weights(state, worker, replica=0)
    is_validation = _Rollout.is_validation or _validation_mark(state).exists()
    if state.settings.wants_step(state.step) and not is_validation and state.step not in _Rollout.opened:
        _open(state, worker)


def trainer_mode(call: Call) -> Steps:
    """``trainer_mode``: the step's rollout is over."""
    if _Rollout.is_open:
        _Rollout.is_open = False
        worker = _vllm_worker(call.owner.rollout)
        _tell(session(), pkgutil.resolve_name(f"{_VLLM}.extension:close_capture")(worker))
    yield


def _vllm_worker(rollout: Any) -> Any:
    """The worker below ``vLLMRollout`` (an ``LLM``), or below ``vLLMAsyncRollout`` (the wrapper of the worker itself)."""
    engine = rollout.inference_engine
    if hasattr(engine, "llm_engine"):
        return engine.llm_engine.model_executor.driver_worker.worker
    return getattr(engine, "worker", None)


def _open(state: Session, worker: Any) -> None:
    settings = pkgutil.resolve_name(f"{_VLLM}.settings:VllmCaptureSettings")(
        path=str(state.settings.rollout_folder(state.step) / "engine-0"),
        task=state.settings.task,
        prompts_only=state.settings.prompts_only,
        max_bytes=state.settings.max_bytes,
        weights_version=state.step,
        record=True,
        run_id=state.settings.run_id,
        config={"verl": state.settings.verl, "step": state.step, "attached": True},
    )
    reply = pkgutil.resolve_name(f"{_VLLM}.extension:open_capture")(worker, settings.encode())
    _Rollout.is_open = not any(reply)
    _Rollout.opened.add(state.step)
    _tell(state, reply)


def _tell(state: Session, reply: tuple[str, str]) -> None:
    if any(reply):
        state.journal.problem(f"step {state.step}, rollout: {reply[1] or reply[0]}")
