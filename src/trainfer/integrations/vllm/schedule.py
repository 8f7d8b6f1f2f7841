"""Whose token each row of a vLLM forward is: vLLM's schedule and token ids -> ``Rows``.

Takes the scheduler's output of a step and the order of the requests in the batch; plain Python. A request's
position comes from what the scheduler has counted as computed, never from the positions that the model is given: those may
be wrong, and are compared. Chunks of a prompt, prefix-cache hits and requests that resume are all the same here:
``num_scheduled`` rows from ``num_computed`` on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainfer.check.probe.given import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """One engine step. Example: "a" decodes its 12th token, "b" computes the rest of a prompt of 9 whose first 4 a
    prefix cache holds: ``scheduled={"a": 1, "b": 5}, computed={"a": 11, "b": 4}, prompts={"b": (…9 ids)}``.
    """

    scheduled: Mapping[str, int]
    """Rows of each request in this step."""
    computed: Mapping[str, int]
    """Rows of each request that were computed before, or found in a cache."""
    prompts: Mapping[str, tuple[int, ...]]
    """Tokens known of requests that begin now."""
    sampling: Mapping[str, Any]
    """vLLM's sampling parameters of requests that begin now."""
    finished: tuple[str, ...]
    """Requests that ended in the step before."""
    drafts: bool
    """True where draft tokens are verified: rows may be rejected, and are then nobody's."""


def read_schedule(output: Any) -> Scheduled:
    """From vLLM's ``SchedulerOutput`` (0.11 to 0.32)."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    prompts: dict[str, tuple[int, ...]] = {}
    sampling: dict[str, Any] = {}
    for new in output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens
        tokens = vars(new).get("prefill_token_ids") or new.prompt_token_ids or ()
        prompts[new.req_id] = tuple(tokens)
        sampling[new.req_id] = new.sampling_params
    return Scheduled(
        scheduled=dict(output.num_scheduled_tokens),
        computed=computed,
        prompts=prompts,
        sampling=sampling,
        finished=tuple(output.finished_req_ids),
        drafts=bool(output.scheduled_spec_decode_tokens),
    )


def rows_of(
    step: Scheduled,
    order: Sequence[str],
    token_ids: Sequence[int],
    *,
    known: Callable[[str], bool],
    earlier: Callable[[str, int], Sequence[int] | None],
) -> Rows | None:
    """The rows of a forward; None where they cannot be told.

    Args:
        step: What was scheduled.
        order: Requests in the order of their rows.
        token_ids: Ids that the model was given, padding at the end.
        known: True for a request whose earlier rows were captured.
        earlier: A request's first so many tokens, where the engine still has them.
    """
    if step.drafts or sum(step.scheduled.values()) > len(token_ids):
        return None
    requests: list[str | None] = []
    positions: list[int] = []
    prefixes: dict[str, Sequence[int]] = {}
    for request in order:
        count, first = step.scheduled[request], step.computed[request]
        requests += [request] * count
        positions += range(first, first + count)
        if first and not known(request):
            begun = step.prompts.get(request, ())
            tokens = begun[:first] if len(begun) >= first else earlier(request, first)
            if tokens is not None:
                prefixes[request] = tokens
    padding = len(token_ids) - len(requests)
    return Rows(
        token_ids=token_ids,
        requests=[*requests, *[None] * padding],
        positions=[*positions, *[-1] * padding],
        prefixes=prefixes,  # type: ignore[arg-type]
    )


def last_rows(step: Scheduled, order: Sequence[str]) -> list[int]:
    """The row of each request whose logits are sampled from: its last one."""
    rows: list[int] = []
    end = 0
    for request in order:
        end += step.scheduled[request]
        rows.append(end - 1)
    return rows
