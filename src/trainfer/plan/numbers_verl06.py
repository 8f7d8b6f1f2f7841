"""What verl 0.6.1 makes of the sizes: the numbers, without judging them.

Rows are sequences on one data-parallel rank. See ``rules_verl06`` for what is wrong with them.
"""

from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked, known
from trainfer.plan.records import Derived, Number, Span
from trainfer.plan.verl_sizes import (
    between,
    ceil_div,
    data_parallel,
    gpus,
    is_megatron,
    longest,
    replicas,
    sequence_parallel,
    uses_ref,
)


def prompts_per_step(asked: Asked) -> int:
    """``data.gen_batch_size`` replaces the train batch size where it is set."""
    return asked.optional_count(keys.GEN) or asked.count(keys.TRAIN, 1024)


def sequences(asked: Asked) -> int:
    """Sequences of one step, all ranks."""
    return prompts_per_step(asked) * asked.count(keys.N, 1)


def rows_per_rank(asked: Asked) -> int:
    """Sequences of one step on one rank."""
    return sequences(asked) // data_parallel(asked)


def mini_rows(asked: Asked) -> int:
    """Sequences of one mini-batch on one rank: prompts x samples, rounded down over the ranks; may be 0."""
    return asked.count(keys.MINI, 256) * asked.count(keys.N, 1) // data_parallel(asked)


def micro_rows(asked: Asked) -> int | None:
    """Sequences of one micro-batch on one rank; the deprecated global size is divided over the ranks."""
    overall = asked.optional_count(keys.MICRO_GLOBAL)
    if overall is not None:
        return overall // data_parallel(asked)
    return asked.optional_count(keys.MICRO)


def log_prob_is_dynamic(asked: Asked) -> bool:
    """Old log-probs follow the actor unless told otherwise."""
    return asked.flag(keys.LOG_PROB_DYNAMIC, default=asked.flag(keys.DYNAMIC))


def ref_is_dynamic(asked: Asked) -> bool:
    """Reference log-probs follow the actor unless told otherwise."""
    return asked.flag(keys.REF_DYNAMIC, default=asked.flag(keys.DYNAMIC))


def _micro_batches(rows: int, budget: int, width: int) -> Number:
    """Micro-batches of a dynamic split: at least for two tokens a sequence, at most if all are full."""
    if not rows:
        return 0
    return between(ceil_div(2 * rows, budget), min(rows, ceil_div(rows * width, budget)))


def _forwards(asked: Asked, *, dynamic: bool, size: str, overall: str, tokens: str) -> Number:
    rows = rows_per_rank(asked)
    if dynamic:
        return _micro_batches(rows, asked.count(tokens, 16384) * sequence_parallel(asked), longest(asked))
    total = asked.optional_count(overall)
    per_rank = asked.count(size) if total is None else total // data_parallel(asked)
    return ceil_div(rows, per_rank) if per_rank else None


def _accumulation(asked: Asked) -> Number:
    rows = mini_rows(asked)
    if not rows:
        return None
    if asked.flag(keys.DYNAMIC):
        budget = asked.count(keys.TOKENS, 16384) * sequence_parallel(asked)
        return _micro_batches(min(rows, rows_per_rank(asked)), budget, longest(asked))
    micro = micro_rows(asked)
    return rows // micro if micro else None


def _micro(asked: Asked) -> Number:
    if not asked.flag(keys.DYNAMIC):
        return micro_rows(asked)
    rows = min(mini_rows(asked), rows_per_rank(asked))
    return Span(min=1, max=rows) if rows > 1 else rows


def _minis(asked: Asked) -> Number:
    mini = mini_rows(asked)
    return ceil_div(rows_per_rank(asked), mini) if mini else None


def _optimizer_steps(asked: Asked) -> Number:
    minis = _minis(asked)
    return minis * asked.count(keys.EPOCHS, 1) if isinstance(minis, int) else None


def _ref_forwards(asked: Asked) -> Number:
    if not uses_ref(asked):
        return 0
    return _forwards(
        asked, dynamic=ref_is_dynamic(asked), size=keys.REF, overall=keys.REF_GLOBAL, tokens=keys.REF_TOKENS
    )


def _validation_multiple(asked: Asked) -> int:
    """Validation is padded to the number of generators and cut again."""
    return asked.count(keys.WORKERS, 8) if asked.text(keys.MODE, "sync") == "async" else replicas(asked)


def derived(asked: Asked) -> Derived:
    """Every number, None where a value that it needs is not known."""
    return Derived(
        num_gpus=known(lambda: gpus(asked)),
        data_parallel_size=known(lambda: data_parallel(asked)),
        prompts_per_step=known(lambda: prompts_per_step(asked)),
        sequences_per_step=known(lambda: sequences(asked)),
        sequences_per_rank=known(lambda: rows_per_rank(asked)),
        rollout_replicas=known(lambda: replicas(asked)),
        sequences_per_replica=known(lambda: sequences(asked) // replicas(asked)),
        mini_batch_sequences_per_rank=known(lambda: mini_rows(asked)),
        mini_batches_per_epoch=known(lambda: _minis(asked)),
        micro_batch_sequences_per_rank=known(lambda: _micro(asked)),
        gradient_accumulation_steps=known(lambda: _accumulation(asked)),
        optimizer_steps_per_step=known(lambda: _optimizer_steps(asked)),
        log_prob_forwards_per_rank=known(
            lambda: _forwards(
                asked,
                dynamic=log_prob_is_dynamic(asked),
                size=keys.LOG_PROB,
                overall=keys.LOG_PROB_GLOBAL,
                tokens=keys.LOG_PROB_TOKENS,
            )
        ),
        ref_log_prob_forwards_per_rank=known(lambda: _ref_forwards(asked)),
        padding_sequences=0,
        learning_rate_steps_per_step=1,
        validation_padded_to_multiple_of=known(lambda: _validation_multiple(asked)),
        validation_sequences_per_prompt=known(lambda: asked.count(keys.VAL_N, 1)),
    )


def notes(asked: Asked) -> Iterator[str]:
    """What is no problem but worth a sentence."""
    if (
        not asked.flag(keys.DYNAMIC)
        and asked.text(keys.LOSS_AGG, "token-mean") == "token-mean"
        and not is_megatron(asked)
    ):
        accumulation = _accumulation(asked)
        if isinstance(accumulation, int) and accumulation > 1:
            yield (
                "token-mean is the mean of each micro-batch's own tokens, averaged over micro-batches: the loss depends "
                "on the micro-batch size where responses differ in length."
            )
    if _minis(asked) == 1 and asked.count(keys.EPOCHS, 1) == 1:
        yield "one optimizer step a step: verl takes the ratio as exactly 1 (old log-probs are its own)."
