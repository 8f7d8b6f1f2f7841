"""What verl 0.9.1 makes of the sizes: the numbers, without judging them.

Rows are sequences on one data-parallel rank. See ``rules_verl09`` for what is wrong with them.
"""

import math
from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked, known
from trainfer.plan.records import Derived, Number, Span
from trainfer.plan.verl_sizes import (
    between,
    ceil_div,
    critic_was_chosen,
    data_parallel,
    full_micro_batches,
    gpus,
    longest,
    replicas,
    sequence_parallel,
    uses_critic,
    uses_ref,
)


def is_v1(asked: Asked) -> bool:
    """True for the default trainer."""
    return asked.flag(keys.V1, default=True)


def updates_per_step(asked: Asked) -> int:
    """Local updates between two weight syncs; more than 1 only in mode separate_async."""
    if is_v1(asked) and asked.text(keys.TRAINER_MODE, "sync") == "separate_async":
        return asked.count(keys.SYNC_EVERY, 4)
    return 1


def sequences(asked: Asked) -> int:
    """Real sequences of one local update, all ranks."""
    return asked.count(keys.TRAIN, 1024) // updates_per_step(asked) * asked.count(keys.N, 1)


def mini_sequences(asked: Asked) -> int:
    """Sequences of one mini-batch, all ranks."""
    return asked.count(keys.MINI, 256) * asked.count(keys.N, 1)


def padding(asked: Asked) -> int:
    """Synthetic sequences of one local update, all ranks."""
    if not is_v1(asked):
        return 0
    multiple = math.lcm(data_parallel(asked), mini_sequences(asked))
    if uses_critic(asked) and critic_was_chosen(asked):
        critic = asked.count(keys.CRITIC_MINI, asked.count(keys.MINI, 256)) * asked.count(keys.N, 1)
        multiple = math.lcm(multiple, critic)
    return -sequences(asked) % multiple


def rows_per_rank(asked: Asked) -> int:
    """Sequences of one local update on one rank, padding included."""
    return (sequences(asked) + padding(asked)) // data_parallel(asked)


def mini_rows(asked: Asked) -> int | None:
    """Sequences of one mini-batch on one rank; None where they are not whole."""
    whole, rest = divmod(mini_sequences(asked), data_parallel(asked))
    return None if rest else whole


def log_prob_is_dynamic(asked: Asked) -> bool:
    """Old log-probs follow the actor unless told otherwise."""
    return asked.flag(keys.LOG_PROB_DYNAMIC, default=asked.flag(keys.DYNAMIC))


def ref_is_dynamic(asked: Asked) -> bool:
    """Reference log-probs follow the actor unless told otherwise."""
    return asked.flag(keys.REF_DYNAMIC, default=asked.flag(keys.DYNAMIC))


def fetches_single_prompts(asked: Asked) -> bool:
    """True where verl overrides ``gen_batch_size`` by 1."""
    return (
        asked.text(keys.TRAINER_MODE, "sync") != "sync"
        or asked.flag(keys.FILTER_GROUPS)
        or asked.flag(keys.REFILL)
    )


def _micro_batches(rows: int, budget: int, width: int) -> Number:
    """Micro-batches of a dynamic split: at least for two tokens a sequence, at most if all are full."""
    return between(ceil_div(2 * rows, budget), min(rows, full_micro_batches(rows, budget, width)))


def _forwards(asked: Asked, *, dynamic: bool, size: str, tokens: str) -> Number:
    rows, updates = rows_per_rank(asked), updates_per_step(asked)
    if dynamic:
        return _times(
            _micro_batches(rows, asked.count(tokens, 16384) * sequence_parallel(asked), longest(asked)),
            updates,
        )
    per_rank = asked.count(size)
    return None if rows % per_rank else rows // per_rank * updates


def _times(number: Number, factor: int) -> Number:
    if isinstance(number, Span):
        return Span(min=number.min * factor, max=number.max * factor)
    return None if number is None else number * factor


def _accumulation(asked: Asked) -> Number:
    mini = mini_rows(asked)
    if mini is None:
        return None
    if asked.flag(keys.DYNAMIC):
        return _micro_batches(
            mini, asked.count(keys.TOKENS, 16384) * sequence_parallel(asked), longest(asked)
        )
    micro = asked.count(keys.MICRO)
    return None if mini % micro else mini // micro


def _micro(asked: Asked) -> Number:
    if not asked.flag(keys.DYNAMIC):
        return asked.optional_count(keys.MICRO)
    mini = mini_rows(asked)
    return None if mini is None else between(1, mini)


def _minis(asked: Asked) -> Number:
    whole, rest = divmod(sequences(asked) + padding(asked), mini_sequences(asked))
    return None if rest or mini_rows(asked) is None else whole


def _optimizer_steps(asked: Asked) -> Number:
    return _times(_minis(asked), asked.count(keys.EPOCHS, 1) * updates_per_step(asked))


def _per_replica(asked: Asked) -> Number:
    total, engines = asked.count(keys.TRAIN, 1024) * asked.count(keys.N, 1), replicas(asked)
    return between(total // engines, ceil_div(total, engines))


def _ref_forwards(asked: Asked) -> Number:
    if not uses_ref(asked):
        return 0
    return _forwards(asked, dynamic=ref_is_dynamic(asked), size=keys.REF, tokens=keys.REF_TOKENS)


def derived(asked: Asked) -> Derived:
    """Every number, None where a value that it needs is not known or verl would not get that far."""
    return Derived(
        num_gpus=known(lambda: gpus(asked)),
        data_parallel_size=known(lambda: data_parallel(asked)),
        prompts_per_step=known(lambda: asked.count(keys.TRAIN, 1024)),
        sequences_per_step=known(lambda: sequences(asked) * updates_per_step(asked)),
        sequences_per_rank=known(lambda: rows_per_rank(asked) * updates_per_step(asked)),
        rollout_replicas=known(lambda: replicas(asked)),
        sequences_per_replica=known(lambda: _per_replica(asked)),
        mini_batch_sequences_per_rank=known(lambda: mini_rows(asked)),
        mini_batches_per_epoch=known(lambda: _minis(asked)),
        micro_batch_sequences_per_rank=known(lambda: _micro(asked)),
        gradient_accumulation_steps=known(lambda: _accumulation(asked)),
        optimizer_steps_per_step=known(lambda: _optimizer_steps(asked)),
        log_prob_forwards_per_rank=known(
            lambda: _forwards(
                asked, dynamic=log_prob_is_dynamic(asked), size=keys.LOG_PROB, tokens=keys.LOG_PROB_TOKENS
            )
        ),
        ref_log_prob_forwards_per_rank=known(lambda: _ref_forwards(asked)),
        padding_sequences=known(lambda: padding(asked) * updates_per_step(asked)),
        learning_rate_steps_per_step=known(lambda: updates_per_step(asked)),
        validation_padded_to_multiple_of=1,
        validation_sequences_per_prompt=known(lambda: asked.count(keys.VAL_N, 1)),
    )


def notes(asked: Asked) -> Iterator[str]:
    """What is no problem but worth a sentence."""
    if not asked.flag(keys.DYNAMIC) and asked.value(keys.MICRO) != asked.value(keys.LOG_PROB):
        yield (
            "old log-probs are computed in other micro-batches than the update: on GPUs the ratio of the first "
            "mini-batch may differ from 1 by rounding."
        )
    if fetches_single_prompts(asked) and asked.optional_count(keys.GEN) not in (None, 1):
        yield f"{asked.named(keys.GEN)} is overridden by 1 in this trainer mode."
