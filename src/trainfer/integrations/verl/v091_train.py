"""What runs around the trainer's functions of verl 0.9.1: passes are captured, micro-batches named, syncs proven.

One dump a step and pass and rank. The hooks on the model are there only while such a pass runs.
"""

import itertools
from collections.abc import Generator
from typing import Any

from trainfer.check.probe.given import Rows
from trainfer.integrations.verl.session import Session, session
from trainfer.integrations.verl.sync_proof import train_weights
from trainfer.integrations.verl.v091_batch import (
    MicroBatch,
    flag,
    packed_part,
    read_micro_batch,
    response_logprobs,
)
from trainfer.integrations.verl.v091_prompts import trim, trims_now
from trainfer.integrations.verl.wrapping import Call

Steps = Generator[None, Any, None]
_calls = itertools.count()


def old_log_prob(call: Call) -> Steps:
    """``compute_log_prob``; with LoRA the reference pass too, which is then the actor without its adapter."""
    data = call.argument("data")
    if flag(data, "no_lora_adapter", default=False):
        yield from _captured("ref_log_prob", call.owner.actor)
    else:
        yield from _captured("old_log_prob", call.owner.actor)


def ref_log_prob(call: Call) -> Steps:
    """``compute_ref_log_prob``: another model, whose weights never change; kept apart and judged by nobody."""
    state = session()
    step = state.step if state.syncs else state.count("ref_log_prob")
    yield from _captured("ref_log_prob", call.owner.ref, step=step)


def update(call: Call) -> Steps:
    """``update_actor``."""
    yield from _captured("update", call.owner.actor)


def _captured(name: str, worker: Any, *, step: int | None = None) -> Steps:
    state = session()
    state.begin_pass(name, worker.engine.module, step=step, states_steps=True)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        state.end_pass(error)


def weights_sent(call: Call) -> Steps:
    """``update_weights``: the rollout has the actor's weights now, and the next step begins."""
    yield
    state = session()
    state.synced(call.argument("global_steps"))
    train_weights(state, call.owner.actor.engine.module, call.owner.config.rollout.get("dtype"))


def micro_batch_inputs(call: Call) -> Steps:
    """``prepare_model_inputs``: packed rows are named; padded ones are read from the attention mask."""
    opened = session().open_pass
    if opened is None:
        yield
        return
    batch = call.argument("micro_batch")
    inputs, _ = yield
    if flag(batch, "use_remove_padding", default=True):
        opened.use_rows(_packed_rows(call.owner, batch, inputs["input_ids"].shape[-1]))
    else:
        opened.use_rows(None)


def _packed_rows(engine: Any, batch: Any, width: int) -> Rows:
    sequences = [part.tolist() for part in batch["input_ids"].unbind()]
    parts = int(engine.ulysses_sequence_parallel_size) if engine.use_ulysses_sp else 1
    if parts == 1:
        flat = [token for sequence in sequences for token in sequence]
        flat += [0] * (width - len(flat))
        return Rows(token_ids=flat, sequence_lengths=[len(sequence) for sequence in sequences])
    from verl.utils.ulysses import get_ulysses_sequence_parallel_rank  # pyright: ignore[reportMissingImports]

    part = packed_part(sequences, rank=get_ulysses_sequence_parallel_rank(), parts=parts, width=width)
    call = next(_calls)  # every call has sequences of its own
    return Rows(
        token_ids=part.token_ids,
        requests=[None if number is None else (call, number) for number in part.requests],
        positions=part.positions,
        prefixes={(call, number): tokens for number, tokens in part.prefixes.items()},
    )


def micro_batch(call: Call) -> Steps:
    """``forward_step``: the sequences of a micro-batch with the log-probs that it gave them."""
    state = session()
    opened = state.open_pass
    if opened is None:
        yield
        return
    batch = read_micro_batch(call.argument("micro_batch"))
    if trims_now(state):
        trim(call)
        batch = batch.prompts()
    _, output = yield
    if call.owner.is_mp_src_rank_with_outputs():
        _record(state, batch, output["model_output"].get("log_probs"))


def _record(state: Session, batch: MicroBatch, log_probs: Any) -> None:
    assert state.open_pass is not None
    values = [[float("nan")] * r for r in batch.response_lengths]
    if log_probs is not None:
        values = response_logprobs(batch, log_probs)
    for temperature in sorted(set(batch.temperatures)):
        chosen = [i for i, own in enumerate(batch.temperatures) if own == temperature and batch.real[i]]
        if not chosen:
            continue
        state.open_pass.record(
            sequences=[batch.sequences[i] for i in chosen],
            prompt_lengths=[batch.prompt_lengths[i] for i in chosen],
            logprobs=[values[i] for i in chosen],
            sampling={"temperature": temperature},
            request_ids=None if batch.names is None else [batch.names[i] for i in chosen],
        )
