"""What trainfer makes of the sizes: the numbers, without judging them. See ``rules_trainfer`` for the rules."""

from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown, known
from trainfer.plan.records import Derived, Number, StepPlan
from trainfer.plan.verl_sizes import between, ceil_div, full_micro_batches

DEFAULT_TOKENS = 16384
"""verl's default of ``actor.ppo_max_token_len_per_gpu``."""
ROW_MULTIPLE = 8
"""Rows of a packed batch on one rank are a multiple of this, as in ``exact.packed``, which loads torch."""


def num_ranks(asked: Asked) -> int:
    """Worker processes of the run."""
    return asked.count(keys.GPUS, 1) * asked.count(keys.NODES, 1)


def data_parallel_size(asked: Asked) -> int:
    """Ranks that hold different sequences; the ranks of a sequence-parallel group hold the same."""
    return max(1, num_ranks(asked) // asked.count(keys.SP, 1))


def longest_sequence(asked: Asked) -> int:
    """Tokens of the longest prompt and response together."""
    return asked.count(keys.PROMPT_TOKENS) + asked.count(keys.RESPONSE_TOKENS)


def uses_ref(asked: Asked) -> bool:
    """True when a KL term needs the frozen reference model."""
    return asked.flag(keys.KL_LOSS) or asked.flag(keys.KL_REWARD)


def dynamic(asked: Asked) -> bool:
    """True when tokens, not sequences, limit the actor's micro-batches; not said: unless a size is given."""
    return asked.flag(keys.DYNAMIC, default=asked.optional_count(keys.MICRO) is None)


def log_prob_dynamic(asked: Asked, switch: str, size: str) -> bool:
    """The same for a log-prob pass, given its switch and the key of its size."""
    return asked.flag(switch, default=asked.optional_count(size) is None)


def _limits(asked: Asked, *, is_dynamic: bool, size: str, tokens: str) -> tuple[int | None, int | None]:
    """Sequences and tokens of one micro-batch of a data-parallel rank; one of them is None."""
    if not is_dynamic:
        return asked.count(size), None
    budget = asked.count(tokens, asked.count(keys.TOKENS, DEFAULT_TOKENS))
    return None, budget * asked.count(keys.SP, 1)


def _micro(asked: Asked) -> tuple[int | None, int | None]:
    return _limits(asked, is_dynamic=dynamic(asked), size=keys.MICRO, tokens=keys.TOKENS)


def _log_prob(asked: Asked) -> tuple[int | None, int | None]:
    is_dynamic = log_prob_dynamic(asked, keys.LOG_PROB_DYNAMIC, keys.LOG_PROB)
    return _limits(asked, is_dynamic=is_dynamic, size=keys.LOG_PROB, tokens=keys.LOG_PROB_TOKENS)


def _ref_log_prob(asked: Asked) -> tuple[int | None, int | None]:
    is_dynamic = log_prob_dynamic(asked, keys.REF_DYNAMIC, keys.REF)
    return _limits(asked, is_dynamic=is_dynamic, size=keys.REF, tokens=keys.REF_TOKENS)


def step_plan(asked: Asked) -> StepPlan:
    """The numbers of one step; raises :class:`NotKnown` where one cannot be known. Check ``problems`` first."""
    ranks, parallel = num_ranks(asked), data_parallel_size(asked)
    prompts, samples, mini = asked.count(keys.TRAIN), asked.count(keys.N, 1), asked.count(keys.MINI)
    micro, micro_tokens = _micro(asked)
    log_prob, ref = _log_prob(asked), _ref_log_prob(asked)
    mini_per_rank = mini * samples // parallel
    epochs = asked.count(keys.EPOCHS, 1)
    return StepPlan(
        num_ranks=ranks,
        data_parallel_size=parallel,
        sequence_parallel_size=asked.count(keys.SP, 1),
        rollout_replicas=max(1, ranks // asked.count(keys.TP, 1)),
        prompts_per_step=prompts,
        sequences_per_prompt=samples,
        sequences_per_step=prompts * samples,
        sequences_per_rank=prompts * samples // parallel,
        max_sequence_tokens=longest_sequence(asked),
        mini_batches_per_epoch=prompts // mini,
        mini_batch_sequences=mini * samples,
        mini_batch_sequences_per_rank=mini_per_rank,
        micro_batch_sequences_per_rank=micro,
        micro_batch_tokens_per_rank=micro_tokens,
        gradient_accumulation_steps=None if micro is None else -(-mini_per_rank // micro),
        log_prob_micro_batch_sequences_per_rank=log_prob[0],
        log_prob_micro_batch_tokens_per_rank=log_prob[1],
        ref_log_prob_micro_batch_sequences_per_rank=ref[0],
        ref_log_prob_micro_batch_tokens_per_rank=ref[1],
        ppo_epochs=epochs,
        optimizer_steps_per_step=epochs * (prompts // mini),
    )


def _micro_batches(rows: int, limits: tuple[int | None, int | None], width: int) -> Number:
    """Micro-batches of ``rows`` sequences under a limit of sequences or of tokens."""
    size, tokens = limits
    if size is not None:
        return ceil_div(rows, size)
    if tokens is None or not rows:
        return None
    return between(ceil_div(2 * rows, tokens), min(rows, full_micro_batches(rows, tokens, width)))


def settled(asked: Asked) -> Asked:
    """With the switches of dynamic batches as they follow from the sizes where nobody set them."""
    switches = {
        keys.DYNAMIC: known(lambda: dynamic(asked)),
        keys.LOG_PROB_DYNAMIC: known(lambda: log_prob_dynamic(asked, keys.LOG_PROB_DYNAMIC, keys.LOG_PROB)),
        keys.REF_DYNAMIC: known(lambda: log_prob_dynamic(asked, keys.REF_DYNAMIC, keys.REF)),
    }
    return asked.with_values({key: value for key, value in switches.items() if value is not None})


def old_log_prob_rows(asked: Asked) -> int:
    """Rows of the largest forward of the old-log-prob pass, all ranks that share its sequences; 0 without a pass."""
    if _old_log_prob_forwards(asked) == 0:
        return 0
    return _packed_rows(asked, _rows(asked), _log_prob(asked))


def ref_log_prob_rows(asked: Asked) -> int:
    """The same of the reference model."""
    return _packed_rows(asked, _rows(asked), _ref_log_prob(asked)) if uses_ref(asked) else 0


def update_rows(asked: Asked) -> int:
    """The same of the update."""
    mini = _mini_rows(asked)
    if mini is None:
        raise NotKnown(keys.MINI)
    return _packed_rows(asked, mini, _micro(asked))


def _packed_rows(asked: Asked, sequences: int, limits: tuple[int | None, int | None]) -> int:
    """Of one forward when all sequences are full; dummies make it a multiple of ``ROW_MULTIPLE`` on each rank."""
    if not sequences:
        return 0
    size, tokens = limits
    width, unit = longest_sequence(asked), ROW_MULTIPLE * asked.count(keys.SP, 1)
    if size is not None:
        sequences = ceil_div(sequences, ceil_div(sequences, size))
    rows = sequences * width if tokens is None else min(tokens, sequences * width)
    return ceil_div(rows, unit) * unit


def _rows(asked: Asked) -> int:
    return asked.count(keys.TRAIN) * asked.count(keys.N, 1) // data_parallel_size(asked)


def _mini_rows(asked: Asked) -> int | None:
    whole, rest = divmod(asked.count(keys.MINI) * asked.count(keys.N, 1), data_parallel_size(asked))
    return None if rest else whole


def _minis(asked: Asked) -> int | None:
    whole, rest = divmod(asked.count(keys.TRAIN), asked.count(keys.MINI))
    return None if rest else whole


def _forwards(asked: Asked, limits: tuple[int | None, int | None]) -> Number:
    return _micro_batches(_rows(asked), limits, longest_sequence(asked))


def _old_log_prob_forwards(asked: Asked) -> Number:
    """0 where no pass of its own is made: the engine's log-probs are taken, or those of the update's own forward.

    The update's forward is made by the very policy that is asked when a step has one optimizer step, and nothing
    needs the old log-probs before it (importance weights, KL in the reward, filtered sampling).
    """
    if asked.flag(keys.BYPASS):
        return 0
    filters = (
        asked.value(keys.TOP_K) not in (None, -1, 0)
        or asked.value(keys.TOP_P) not in (None, 1)
        or asked.value(keys.MIN_P) not in (None, 0)
    )
    needed_before = asked.value(keys.ROLLOUT_WEIGHTS) is not None or asked.flag(keys.KL_REWARD)
    if _steps(asked) == 1 and not filters and not needed_before:
        return 0
    return _forwards(asked, _log_prob(asked))


def _micro_rows(asked: Asked) -> Number:
    """Sequences of one micro-batch: a rank's mini-batch dealt out as evenly as it goes, or as lengths decide."""
    mini, size, count = _mini_rows(asked), _micro(asked)[0], _accumulation(asked)
    if mini is None:
        return size
    if isinstance(count, int) and (size is not None or count == 1):
        return between(mini // count, ceil_div(mini, count))
    return between(1, mini)


def _accumulation(asked: Asked) -> Number:
    mini = _mini_rows(asked)
    return None if mini is None else _micro_batches(mini, _micro(asked), longest_sequence(asked))


def _steps(asked: Asked) -> int | None:
    count = _minis(asked)
    return None if count is None else count * asked.count(keys.EPOCHS, 1)


def _replicas(asked: Asked) -> int | None:
    if num_ranks(asked) == 1:  # which may drive a vLLM of several GPUs
        return 1
    whole, rest = divmod(num_ranks(asked), asked.count(keys.TP, 1))
    return None if rest else whole


def _per_replica(asked: Asked) -> Number:
    engines, total = _replicas(asked), asked.count(keys.TRAIN) * asked.count(keys.N, 1)
    return None if not engines else between(total // engines, ceil_div(total, engines))


def derived(asked: Asked) -> Derived:
    """The same numbers as ``step_plan``, one by one, so that one bad size does not hide the others."""
    return Derived(
        num_gpus=known(lambda: num_ranks(asked)),
        data_parallel_size=known(lambda: data_parallel_size(asked)),
        prompts_per_step=known(lambda: asked.count(keys.TRAIN)),
        sequences_per_step=known(lambda: asked.count(keys.TRAIN) * asked.count(keys.N, 1)),
        sequences_per_rank=known(lambda: _rows(asked)),
        rollout_replicas=known(lambda: _replicas(asked)),
        sequences_per_replica=known(lambda: _per_replica(asked)),
        mini_batch_sequences_per_rank=known(lambda: _mini_rows(asked)),
        mini_batches_per_epoch=known(lambda: _minis(asked)),
        micro_batch_sequences_per_rank=known(lambda: _micro_rows(asked)),
        gradient_accumulation_steps=known(lambda: _accumulation(asked)),
        optimizer_steps_per_step=known(lambda: _steps(asked)),
        log_prob_forwards_per_rank=known(lambda: _old_log_prob_forwards(asked)),
        ref_log_prob_forwards_per_rank=known(
            lambda: _forwards(asked, _ref_log_prob(asked)) if uses_ref(asked) else 0
        ),
        padding_sequences=0,
        learning_rate_steps_per_step=1,
        validation_padded_to_multiple_of=1,
        validation_sequences_per_prompt=known(lambda: asked.count(keys.VAL_N, 1)),
    )


def notes(asked: Asked) -> Iterator[str]:
    """What is no problem but worth a sentence."""
    if _old_log_prob_forwards(asked) == 0 and not asked.flag(keys.BYPASS):
        yield (
            "one optimizer step a step: the update's own forward gives the old log-probs (the ratio is exactly 1), and no "
            "pass is made for them."
        )
    micro = asked.optional_count(keys.MICRO)
    rows = asked.count(keys.MINI) * asked.count(keys.N, 1) // data_parallel_size(asked)
    if micro is not None and not dynamic(asked) and rows % micro:
        yield (
            f"a rank's mini-batch of {rows} sequences makes {ceil_div(rows, micro)} micro-batches of at most {micro}: "
            "they need not be equal, the gradient is the same."
        )
