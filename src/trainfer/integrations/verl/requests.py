"""What a rollout server returned, request by request, as recorded sequences: one dump a step and server.

verl trains on exactly these token ids and log-probs, so they are recorded where they leave the server. Takes plain lists; no
torch, nothing of vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trainfer.check.probe.sequences import check_sequences
from trainfer.integrations.verl.bare_dump import BareDump
from trainfer.integrations.verl.session import Session, session


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One finished request."""

    request: str
    prompt: list[int]
    response: list[int]
    logprobs: list[float] | None
    """None where verl did not ask for them (``rollout.calculate_log_probs``)."""
    params: Mapping[str, object]
    """As verl asked; vLLM's defaults where a key is missing."""
    logprobs_mode: str
    """``processed_logprobs``: of the distribution that was sampled; ``raw_logprobs`` and "": before temperature and filters."""
    step: int
    replica: int


def sampling_of(params: Mapping[str, object], logprobs_mode: str) -> dict[str, float | int]:
    """What was applied to the recorded log-probs.

    Example: ``{"temperature": 0.7, "top_k": -1}`` under ``processed_logprobs`` is temperature 0.7; under ``raw_logprobs`` it is 1.
    """
    if not logprobs_mode.startswith("processed"):
        return {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    top_k = int(_number(params, "top_k", -1))
    return {
        "temperature": _number(params, "temperature", 1.0),
        "top_k": top_k if top_k > 0 else -1,
        "top_p": _number(params, "top_p", 1.0),
        "min_p": _number(params, "min_p", 0.0),
    }


def _number(params: Mapping[str, object], key: str, default: float) -> float:
    value = params.get(key, default)
    return float(value) if isinstance(value, int | float) else default


def record_request(state: Session, sampled: Sampled) -> None:
    """Write one request. An aborted one, without a token, is left out.

    Raises:
        CaptureError: there is not one log-prob for each token.
        DumpError: the step's folder was used before.
        OSError: it cannot be written.
    """
    if not sampled.response:
        return
    response = [] if state.settings.prompts_only else sampled.response
    values = sampled.logprobs if sampled.logprobs is not None else [float("nan")] * len(response)
    if state.settings.prompts_only:
        values = []
    dump = _dump(sampled.step, sampled.replica)
    (record,) = check_sequences(
        [[*sampled.prompt, *response]],
        [len(sampled.prompt)],
        [values],
        sampling_of(sampled.params, sampled.logprobs_mode),
        [sampled.request],
        first=dump.num_records,
        weights_version=sampled.step,
        step=sampled.step,
        pass_name="prefill" if state.settings.prompts_only else "decode",
    )
    dump.put(record, step=sampled.step, pass_name=record.pass_name)
    dump.mark()


@cache
def _dump(step: int, replica: int) -> BareDump:
    """One for each step and server, made at its first request."""
    settings = session().settings
    return BareDump(
        settings.rollout_folder(step) / f"requests-{replica}",
        side="rollout",
        run_id=settings.run_id,
        config={"verl": settings.verl, "step": step, "attached": True},
    )
