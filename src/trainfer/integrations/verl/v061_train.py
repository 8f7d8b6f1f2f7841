"""What runs around the trainer's functions of verl 0.6.1: passes are captured, the rows of micro-batches named.

One dump a step and pass and rank. The hooks on the model are there only while such a pass runs. The step is that of the weights:
see ``v061_rollout``.
"""

import itertools
from collections.abc import Generator, Sequence
from typing import Any

from trainfer.check.probe.given import Rows
from trainfer.integrations.verl.session import OpenPass, session
from trainfer.integrations.verl.v061_batch import MicroBatch, read_micro_batch, response_logprobs
from trainfer.integrations.verl.v061_prompts import forward_prompts, trims_now
from trainfer.integrations.verl.v091_batch import packed_part
from trainfer.integrations.verl.wrapping import Call

Steps = Generator[None, Any, None]
_calls = itertools.count()


class _Actor:
    """What this process knows of its actor."""

    is_base = False
    """True while log-probs are asked of it without its adapter: it is then the reference."""
    updates = 0


def updates_done() -> int:
    """Updates of the actor in this process."""
    return _Actor.updates


def worker_log_prob(call: Call) -> Steps:
    """``ActorRolloutRefWorker.compute_log_prob``; with LoRA the reference pass too."""
    data = call.argument("data")
    _Actor.is_base = bool(data.meta_info.get("is_lora", False))
    try:
        yield
    finally:
        _Actor.is_base = False


def log_prob(call: Call) -> Steps:
    """``DataParallelPPOActor.compute_log_prob`` of the actor, or of the reference, which has no optimizer."""
    is_reference = call.owner.actor_optimizer is None or _Actor.is_base
    yield from _captured("ref_log_prob" if is_reference else "old_log_prob", call.owner)


def update(call: Call) -> Steps:
    """``update_policy``: the weights that the next sync sends are others."""
    try:
        yield from _captured("update", call.owner)
    finally:
        _Actor.updates += 1


def _captured(name: str, actor: Any) -> Steps:
    state = session()
    state.begin_pass(name, actor.actor_module)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        state.end_pass(error)


def micro_batch(call: Call) -> Steps:
    """``_forward_micro_batch``: its rows before, its sequences with their log-probs behind."""
    state = session()
    opened = state.open_pass
    if opened is None:
        yield
        return
    given = call.argument("micro_batch")
    temperature = float(call.argument("temperature"))
    batch = read_micro_batch(given)
    if trims_now(state):
        batch = _without_responses(batch)
        _name_rows(opened, call.owner, batch)
        forward_prompts(call)
        yield
        _record(opened, batch, [[] for _ in batch.sequences], temperature)
        return
    _name_rows(opened, call.owner, batch)
    _, log_probs = yield
    _record(opened, batch, response_logprobs(batch, log_probs), temperature)


def _without_responses(batch: MicroBatch) -> MicroBatch:
    prompts = [s[:length] for s, length in zip(batch.sequences, batch.prompt_lengths, strict=True)]
    return MicroBatch(sequences=prompts, response_lengths=[0] * len(prompts))


def _record(
    opened: OpenPass, batch: MicroBatch, logprobs: Sequence[Sequence[float]], temperature: float
) -> None:
    opened.record(
        sequences=batch.sequences,
        prompt_lengths=batch.prompt_lengths,
        logprobs=logprobs,
        sampling={"temperature": temperature},
    )


def _name_rows(opened: OpenPass, actor: Any, batch: MicroBatch) -> None:
    """Packed rows are named; padded ones are read from the attention mask."""
    if not actor.use_remove_padding:
        opened.use_rows(None)
        return
    parts = int(actor.ulysses_sequence_parallel_size) if actor.use_ulysses_sp else 1
    flat = [token for sequence in batch.sequences for token in sequence]
    if parts == 1:
        opened.use_rows(
            Rows(token_ids=flat, sequence_lengths=[len(sequence) for sequence in batch.sequences])
        )
        return
    from verl.utils.ulysses import get_ulysses_sequence_parallel_rank  # pyright: ignore[reportMissingImports]

    part = packed_part(
        batch.sequences, rank=get_ulysses_sequence_parallel_rank(), parts=parts, width=-(-len(flat) // parts)
    )
    number = next(_calls)  # every call has sequences of its own
    opened.use_rows(
        Rows(
            token_ids=part.token_ids,
            requests=[None if place is None else (number, place) for place in part.requests],
            positions=part.positions,
            prefixes={(number, place): tokens for place, tokens in part.prefixes.items()},
        )
    )
