"""Cures that are not a nearby number: what to set where a key is missing, doubled, or of the wrong kind."""

from collections.abc import Callable, Iterator, Mapping

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown
from trainfer.plan.records import Problem, Value
from trainfer.plan.verl_sizes import ceil_div, data_parallel, longest, sequence_parallel

Changes = Mapping[str, Value]


def cures(asked: Asked, problem: Problem) -> Iterator[Changes]:
    """What to try for this problem, best first; nothing where only nearby numbers can help."""
    cure = _CURES.get(problem.code)
    if cure is None:
        return
    try:
        yield from cure(asked, problem)
    except NotKnown:
        return


def has_cure(code: str) -> bool:
    """True where numbers nearby need not be tried."""
    return code in _CURES


def _divisors_up_to(number: int, limit: int) -> list[int]:
    return [size for size in range(min(number, limit), 0, -1) if number % size == 0]


def _rows_of_mini(asked: Asked) -> int:
    return max(1, asked.count(keys.MINI, 256) * asked.count(keys.N, 1) // data_parallel(asked))


def _actor_size(asked: Asked, _: Problem) -> Iterator[Changes]:
    for size in _divisors_up_to(_rows_of_mini(asked), 8)[:3]:
        yield {keys.MICRO: size}


def _log_prob_size(asked: Asked, problem: Problem) -> Iterator[Changes]:
    micro = asked.values.get(keys.MICRO)
    limit = micro if isinstance(micro, int) and micro > 0 else 8
    for size in _divisors_up_to(_rows_of_mini(asked), limit)[:3]:
        yield {problem.keys[0]: size}


def _not_positive(asked: Asked, problem: Problem) -> Iterator[Changes]:
    key = problem.keys[0]
    if key in (keys.LOG_PROB, keys.REF):
        yield from _log_prob_size(asked, problem)
    elif key == keys.MICRO:
        yield from _actor_size(asked, problem)
    elif key not in (keys.GPUS, keys.NODES):
        yield {key: 1}


def _take_back_all(asked: Asked, problem: Problem) -> Iterator[Changes]:
    yield {key: None for key in problem.keys if key != keys.DYNAMIC and asked.values.get(key) is not None}


def _take_back_first(_: Asked, problem: Problem) -> Iterator[Changes]:
    yield {problem.keys[0]: None}


def _to_per_gpu(asked: Asked, problem: Problem) -> Iterator[Changes]:
    overall, per_gpu = problem.keys[0], problem.keys[-1]
    if overall == per_gpu:
        per_gpu = f"{overall}_per_gpu"
    total = asked.values.get(overall)
    wanted = total // data_parallel(asked) if isinstance(total, int) else 8
    for size in _divisors_up_to(_rows_of_mini(asked), max(1, wanted))[:3]:
        yield {overall: None, per_gpu: size}


def _budget(asked: Asked, problem: Problem) -> Iterator[Changes]:
    yield {problem.keys[0]: ceil_div(longest(asked), sequence_parallel(asked))}


def _whole_sequences_in_budget(asked: Asked, _: Problem) -> Iterator[Changes]:
    sp, width = sequence_parallel(asked), longest(asked)
    held = asked.count(keys.TOKENS, 16384) * sp // width
    for count in (held, held + 1):
        if count and count * width % sp == 0:
            yield {keys.TOKENS: count * width // sp}


def _same_dynamic(asked: Asked, _: Problem) -> Iterator[Changes]:
    yield {keys.LOG_PROB_DYNAMIC: asked.flag(keys.DYNAMIC)}


def _same_generation_size(asked: Asked, _: Problem) -> Iterator[Changes]:
    yield {keys.GEN: asked.count(keys.TRAIN, 1024)}
    yield {keys.TRAIN: asked.count(keys.GEN)}


def _whole_fetches(asked: Asked, _: Problem) -> Iterator[Changes]:
    for size in _divisors_up_to(asked.count(keys.TRAIN, 1024), asked.count(keys.GEN))[:2]:
        yield {keys.GEN: size}


def _always(key: str, *, value: Value) -> Callable[[Asked, Problem], Iterator[Changes]]:
    """A cure that does not depend on the other values."""

    def cure(_: Asked, __: Problem) -> Iterator[Changes]:
        yield {key: value}

    return cure


_CURES: dict[str, Callable[[Asked, Problem], Iterator[Changes]]] = {
    "not_a_positive_whole_number": _not_positive,
    "micro_batch_size_missing": _actor_size,
    "micro_batch_size_set_twice": _take_back_first,
    "micro_batch_size_ignored": _take_back_all,
    "micro_batch_becomes_zero": _to_per_gpu,
    "mini_batch_not_divisible_by_global_micro": _to_per_gpu,
    "global_micro_smaller_than_gpus": _to_per_gpu,
    "global_micro_batch_size_not_supported": _to_per_gpu,
    "log_prob_micro_batch_size_missing": _log_prob_size,
    "log_prob_micro_batch_size_set_twice": _take_back_first,
    "log_prob_micro_batch_becomes_zero": _to_per_gpu,
    "critic_micro_batch_size_missing": _always(keys.ADVANTAGE, value="grpo"),
    "loss_agg_mode_unknown": _always(keys.LOSS_AGG, value="token-mean"),
    "sequence_parallel_without_remove_padding": _always(keys.REMOVE_PADDING, value=True),
    "rollout_mode_sync_removed": _always(keys.MODE, value="async"),
    "dynamic_batches_disagree": _same_dynamic,
    "token_budget_smaller_than_sequence": _budget,
    "token_budget_can_be_exceeded": _whole_sequences_in_budget,
    "gpus_not_divisible_by_fsdp_size": _always(keys.FSDP_SIZE, value=-1),
    "validation_temperature": _always(keys.VAL_SAMPLE, value=False),
    "lora_rank_above_engine_limit": _always(keys.LORA_RANK, value=512),
    "balance_batch_ignored": _always(keys.BALANCE, value=True),
    "gen_batch_size_replaces_train_batch_size": _same_generation_size,
    "train_batch_not_whole_fetches": _whole_fetches,
    "engine_without_tensor_parallel": _always(keys.TP, value=1),
}
