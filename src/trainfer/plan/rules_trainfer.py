"""Rule set ``trainfer``: what trainfer's own training step does with the sizes that were asked for.

Tensors are packed by token and the loss is normalised over the whole mini-batch across ranks, so
a micro-batch size need not divide anything: the last micro-batch is simply smaller. What must
hold: whole mini-batches in a step, equal numbers of sequences on every data-parallel rank for
every optimizer step, whole engines and sequence-parallel groups in the world, and budgets that
hold the longest sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown
from trainfer.plan.numbers_trainfer import (
    DEFAULT_TOKENS,
    data_parallel_size,
    dynamic,
    log_prob_dynamic,
    longest_sequence,
    num_ranks,
    uses_ref,
)
from trainfer.plan.records import Problem
from trainfer.plan.verl_worker_checks import heads_split, shard_groups_are_whole


def _error(code: str, *names: str, message: str) -> Problem:
    return Problem(severity="error", when="config", code=code, keys=names, message=message)


def _whole_mini_batches(asked: Asked) -> Iterator[Problem]:
    prompts, mini = asked.count(keys.TRAIN), asked.count(keys.MINI)
    if prompts < mini:
        yield _error(
            "train_batch_smaller_than_mini_batch",
            keys.TRAIN,
            keys.MINI,
            message=f"{keys.TRAIN}={prompts} prompts a step are fewer than {keys.MINI}={mini} prompts of one "
            f"optimizer step. Both count prompts. Set the mini-batch to {prompts} or a divisor of it.",
        )
    elif prompts % mini:
        yield _error(
            "train_batch_not_divisible_by_mini_batch",
            keys.TRAIN,
            keys.MINI,
            message=f"{keys.TRAIN}={prompts} prompts a step are not whole mini-batches of {keys.MINI}={mini}: "
            f"{prompts % mini} prompts would be left over. Set {keys.TRAIN} to a multiple of {mini}, "
            f"e.g. {prompts - prompts % mini} or {prompts + mini - prompts % mini}.",
        )


def _equal_ranks(asked: Asked) -> Iterator[Problem]:
    mini, samples, ranks = asked.count(keys.MINI), asked.count(keys.N, 1), data_parallel_size(asked)
    if mini * samples % ranks:
        yield _error(
            "mini_batch_not_divisible_by_ranks",
            keys.MINI,
            keys.N,
            keys.GPUS,
            keys.NODES,
            keys.SP,
            message=f"a mini-batch of {mini} prompts x {samples} samples = {mini * samples} sequences does not deal "
            f"evenly to {ranks} data-parallel ranks. Set {keys.MINI} or {keys.N} so that their product is a "
            f"multiple of {ranks}.",
        )


def _whole_groups_of_ranks(asked: Asked) -> Iterator[Problem]:
    ranks = num_ranks(asked)
    for code, key, what in (
        ("world_not_divisible_by_sequence_parallel", keys.SP, "sequence-parallel groups"),
        ("world_not_divisible_by_rollout_tp", keys.TP, "rollout engines"),
    ):
        size = asked.count(key, 1)
        if ranks % size and not (key == keys.TP and ranks == 1):
            divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
            yield _error(
                code,
                key,
                keys.GPUS,
                keys.NODES,
                message=f"{ranks} ranks are not whole {what} of {key}={size}. Set it to one of {divisors}.",
            )


def _engine_can_be_split(asked: Asked) -> Iterator[Problem]:
    """One rank can drive a vLLM of several GPUs; of several ranks each hosts an engine of its own."""
    engine, size, ranks = asked.text(keys.ENGINE, "builtin"), asked.count(keys.TP, 1), num_ranks(asked)
    if size == 1 or (engine == "vllm" and ranks == 1):
        return
    why = (
        f"each of {ranks} ranks hosts an engine of its own"
        if engine == "vllm"
        else f"the engine {engine} keeps a whole model on every rank"
    )
    yield _error(
        "engine_without_tensor_parallel",
        keys.TP,
        keys.ENGINE,
        message=f"{keys.TP}={size}, but {why}. Set it to 1.",
    )


def _a_limit_each(asked: Asked) -> Iterator[Problem]:
    for is_dynamic, size, switch, budget in (
        (dynamic(asked), keys.MICRO, keys.DYNAMIC, keys.TOKENS),
        (asked.value(keys.LOG_PROB_DYNAMIC), keys.LOG_PROB, keys.LOG_PROB_DYNAMIC, keys.LOG_PROB_TOKENS),
        (asked.value(keys.REF_DYNAMIC), keys.REF, keys.REF_DYNAMIC, keys.REF_TOKENS),
    ):
        if is_dynamic is False and asked.optional_count(size) is None:
            yield _error(
                "micro_batch_size_missing",
                size,
                switch,
                message=f"{size} is not set and {switch} is false: nothing says how many sequences share a "
                f"forward pass. Set {size}, or {switch}=true with {budget}.",
            )


def _budgets_hold_the_longest(asked: Asked) -> Iterator[Problem]:
    longest, sp = longest_sequence(asked), asked.count(keys.SP, 1)
    for is_dynamic, key in (
        (dynamic(asked), keys.TOKENS),
        (log_prob_dynamic(asked, keys.LOG_PROB_DYNAMIC, keys.LOG_PROB), keys.LOG_PROB_TOKENS),
        (uses_ref(asked) and log_prob_dynamic(asked, keys.REF_DYNAMIC, keys.REF), keys.REF_TOKENS),
    ):
        budget = asked.count(key, asked.count(keys.TOKENS, DEFAULT_TOKENS))
        if is_dynamic and budget * sp < longest:
            yield _error(
                "token_budget_smaller_than_sequence",
                key,
                keys.PROMPT_TOKENS,
                keys.RESPONSE_TOKENS,
                message=f"{key}={budget} (times sequence-parallel size {sp}) does not hold the longest sequence, "
                f"{keys.PROMPT_TOKENS} + {keys.RESPONSE_TOKENS} = {longest} tokens. Set it to at least "
                f"{-(-longest // sp)}.",
            )


def _shared_with_verl(asked: Asked) -> Iterator[Problem]:
    """Shard groups and attention heads, in our own words only."""
    for problem in (*shard_groups_are_whole(asked), *heads_split(asked)):
        yield replace(problem, when="config", upstream_message=None)


RULES: tuple[Callable[[Asked], Iterator[Problem]], ...] = (
    _whole_mini_batches,
    _equal_ranks,
    _whole_groups_of_ranks,
    _engine_can_be_split,
    _a_limit_each,
    _budgets_hold_the_longest,
    _shared_with_verl,
)


def problems(asked: Asked) -> list[Problem]:
    """Every problem at once; rules that need a value which is not known say nothing."""
    found: list[Problem] = []
    for rule in RULES:
        try:
            found.extend(rule(asked))
        except NotKnown:
            continue
    return found
