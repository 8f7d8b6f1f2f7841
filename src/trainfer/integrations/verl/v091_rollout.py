"""What runs around the rollout's functions of verl 0.9.1: its server, and vLLM's workers below it.

The server records what it returned, as verl trains on it; the workers are captured from within by trainfer's vLLM adapter, one
dump a step. Adapters do not import one another, so that one is called by name.
"""

import os
import pkgutil
from collections.abc import Generator
from typing import Any

from trainfer.integrations.verl.requests import Sampled, record_request
from trainfer.integrations.verl.session import Session, session
from trainfer.integrations.verl.sync_proof import rollout_weights
from trainfer.integrations.verl.wrapping import Call

Steps = Generator[None, Any, None]
REPLICA = "TRAINFER_ATTACH_REPLICA"
"""Which engine of the run a process belongs to; set in the server, inherited by vLLM's processes below it."""
_VLLM = "trainfer.integrations.vllm"


def launched(call: Call) -> Steps:
    """``launch_server``: the processes that vLLM starts now learn whose they are."""
    os.environ[REPLICA] = str(int(call.owner.replica_rank))
    yield


def weights_version(call: Call) -> Steps:
    """``set_global_steps``: what is sampled from now on comes from the next weights."""
    yield
    session().synced(call.argument("global_steps"))


def generated(call: Call) -> Steps:
    """``generate``: one request, its sampled tokens and their log-probs."""
    state = session()
    prompt = [int(token) for token in call.argument("prompt_ids")]
    params = dict(call.argument("sampling_params") or {})
    step = state.step
    output = yield
    if output is None or not state.settings.wants_step(step):
        return
    logprobs = getattr(output, "log_probs", None)
    mode = str(getattr(call.owner.config, "logprobs_mode", None) or "")
    record_request(
        state,
        Sampled(
            request=str(call.argument("request_id")),
            prompt=prompt,
            response=[int(token) for token in output.token_ids],
            logprobs=None if logprobs is None else [float(value) for value in logprobs],
            params=params,
            logprobs_mode=mode,
            step=step,
            replica=int(call.owner.replica_rank),
        ),
    )


def weights_received(call: Call) -> Steps:
    """``update_weights_from_ipc``, in vLLM's worker: the step before has ended, and the next one is captured."""
    state = session()
    _close(state, call.owner)
    yield
    if call.argument("peft_config") and not call.argument("base_sync_done", default=False):
        return
    state.synced(None)
    replica = int(os.environ.get(REPLICA) or 0)
    rollout_weights(state, call.owner, replica=replica)
    if state.settings.wants_step(state.step):
        _open(state, call.owner, replica)


def _open(state: Session, worker: Any, replica: int) -> None:
    settings = pkgutil.resolve_name(f"{_VLLM}.settings:VllmCaptureSettings")(
        path=str(state.settings.rollout_folder(state.step) / f"engine-{replica}"),
        task=state.settings.task,
        prompts_only=state.settings.prompts_only,
        max_bytes=state.settings.max_bytes,
        weights_version=state.step,
        record=False,
        run_id=state.settings.run_id,
        config={"verl": state.settings.verl, "step": state.step, "attached": True},
    )
    _tell(state, pkgutil.resolve_name(f"{_VLLM}.extension:open_capture")(worker, settings.encode()))


def _close(state: Session, worker: Any) -> None:
    _tell(state, pkgutil.resolve_name(f"{_VLLM}.extension:close_capture")(worker))


def _tell(state: Session, reply: tuple[str, str]) -> None:
    if any(reply):
        state.journal.problem(f"step {state.step}, rollout: {reply[1] or reply[0]}")
