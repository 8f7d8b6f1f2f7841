"""Rule set ``verl-0.6``: what verl 0.6.1 does with the sizes on its FSDP worker path.

A rank's mini-batch is rounded down, the step is split by it with a ragged tail, and every
micro-batch's loss is scaled by the *configured* number of micro-batches: several wrong sizes run on
with too small a gradient and no message. Those are errors here, with the size of the effect.
"""

from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked
from trainfer.plan.numbers_verl06 import (
    log_prob_is_dynamic,
    micro_rows,
    mini_rows,
    prompts_per_step,
    ref_is_dynamic,
    rows_per_rank,
    sequences,
)
from trainfer.plan.records import Problem
from trainfer.plan.verl_config_checks import (
    SHARED_RULES,
    Rule,
    lora_rank,
    loss_agg_mode,
    reward_model_micro_pair,
)
from trainfer.plan.verl_sizes import (
    budget_problem,
    ceil_div,
    data_parallel,
    divisors,
    error,
    full_micro_batches,
    gpus,
    longest,
    replicas,
    sequence_parallel,
    uses_ref,
    warning,
)
from trainfer.plan.verl_worker_checks import SHARED_WORKER_RULES


def _mini_batch_is_not_empty(asked: Asked) -> Iterator[Problem]:
    if mini_rows(asked) > 0:
        return
    mini, samples, ranks = asked.count(keys.MINI, 256), asked.count(keys.N, 1), data_parallel(asked)
    yield error(
        "mini_batch_becomes_zero",
        "init",
        keys.MINI,
        keys.N,
        message=f"{asked.named(keys.MINI)} prompts x {samples} samples // {ranks} ranks = 0 sequences a rank: {mini} x "
        f"{samples} // {ranks} = 0. The smallest {keys.short(keys.MINI)} is {ceil_div(ranks, samples)}.",
        upstream="ppo_mini_batch_size 0 should be larger than 0 after normalization",
    )


def _micro_divides_mini(asked: Asked) -> Iterator[Problem]:
    rows, micro = mini_rows(asked), micro_rows(asked)
    if not rows or micro is None:
        return
    if micro == 0:
        yield error(
            "micro_batch_becomes_zero",
            "init",
            keys.MICRO_GLOBAL,
            message=f"{asked.named(keys.MICRO_GLOBAL)} over {data_parallel(asked)} ranks is 0 sequences a rank. "
            f"Use {keys.short(keys.MICRO)} instead.",
            upstream="integer modulo by zero",
        )
    elif rows % micro:
        ignored = " It is checked even though batches are dynamic." if asked.flag(keys.DYNAMIC) else ""
        yield error(
            "mini_batch_not_divisible_by_micro",
            "init",
            keys.MICRO,
            keys.MINI,
            keys.N,
            message=f"a rank's mini-batch of {rows} sequences ({asked.named(keys.MINI)} x {asked.count(keys.N, 1)} samples "
            f"over {data_parallel(asked)} ranks) is not whole micro-batches of {micro}. "
            f"Allowed micro-batch sizes: {divisors(rows)}.{ignored}",
            upstream=f"normalized ppo_mini_batch_size {rows} should be divisible by ppo_micro_batch_size_per_gpu {micro}",
        )


def _total_is_refused(asked: Asked) -> bool:
    """True where verl's configuration check has said so already."""
    configured = asked.count(keys.TRAIN, 1024) * asked.count(keys.N, 1)
    return not asked.flag(keys.DYNAMIC) and configured % gpus(asked) != 0


def _generation_splits_evenly(asked: Asked) -> Iterator[Problem]:
    total = sequences(asked)
    if asked.text(keys.MODE, "sync") == "async":
        parts, key, what = asked.count(keys.WORKERS, 8), keys.WORKERS, "generation workers"
        remedy = f"Set it to one of {divisors(total, limit=12)}."
    elif _total_is_refused(asked):
        return
    else:
        parts, key, what = replicas(asked), keys.TP, "rollout engines"
        remedy = f"Set {keys.short(keys.TRAIN)} x {keys.short(keys.N)} to a multiple of {parts}."
    if total % parts:
        yield error(
            "generation_not_an_equal_split",
            "run",
            key,
            keys.TRAIN,
            keys.N,
            message=f"{total} sequences do not split evenly over {parts} {what} ({asked.named(key)}). {remedy}",
            upstream=f"only support equal chunk. Got size of DataProto {total} and chunk {parts}.",
        )


def _ranks_split_evenly(asked: Asked) -> Iterator[Problem]:
    total, world, ranks = sequences(asked), gpus(asked), data_parallel(asked)
    if _total_is_refused(asked):
        return
    if asked.flag(keys.BALANCE, default=True) and total % world:
        few = total < world
        yield error(
            "total_not_divisible_by_gpus",
            "run",
            keys.TRAIN,
            keys.N,
            keys.GEN,
            message=f"{total} sequences a step are not equal parts for {world} GPUs; {keys.BALANCE} needs them.",
            upstream=f"number of items:[{total}] < k_partitions:[{world}]"
            if few
            else f"{total} % {world} != 0",
        )
    elif total % ranks:
        yield error(
            "total_not_divisible_by_ranks",
            "run",
            keys.TRAIN,
            keys.N,
            keys.GEN,
            message=f"{total} sequences a step are not equal parts for {ranks} data-parallel ranks.",
            upstream=f"only support equal chunk. Got size of DataProto {total} and chunk {ranks}.",
        )


def _budgets(asked: Asked) -> Iterator[Problem]:
    for used, key, what in (
        (asked.flag(keys.DYNAMIC), keys.TOKENS, "update"),
        (log_prob_is_dynamic(asked), keys.LOG_PROB_TOKENS, "old log-probs"),
        (uses_ref(asked) and ref_is_dynamic(asked), keys.REF_TOKENS, "reference log-probs"),
    ):
        problem = budget_problem(asked, key, what=what) if used else None
        if problem is not None:
            yield problem


def _log_prob_sizes_exist(asked: Asked) -> Iterator[Problem]:
    for used, key, overall in (
        (not log_prob_is_dynamic(asked), keys.LOG_PROB, keys.LOG_PROB_GLOBAL),
        (uses_ref(asked) and not ref_is_dynamic(asked), keys.REF, keys.REF_GLOBAL),
    ):
        total = asked.optional_count(overall)
        if used and total is not None and total < data_parallel(asked):
            yield error(
                "log_prob_micro_batch_becomes_zero",
                "run",
                overall,
                message=f"{asked.named(overall)} over {data_parallel(asked)} ranks is 0 sequences a rank.",
                upstream="range() arg 3 must not be zero",
            )
        if used and asked.flag(keys.DYNAMIC) and asked.value(key) is None and total is None:
            yield error(
                "log_prob_micro_batch_size_missing",
                "run",
                key,
                message=f"log-probs are not dynamic, but {key} is not set; verl checks it only where the actor is "
                "not dynamic either.",
            )


def _mini_batch_is_floored(asked: Asked) -> Iterator[Problem]:
    mini, samples, ranks = asked.count(keys.MINI, 256), asked.count(keys.N, 1), data_parallel(asked)
    rows = mini_rows(asked)
    if not rows or not mini * samples % ranks:
        return
    intended = ceil_div(prompts_per_step(asked), mini)
    real = ceil_div(rows_per_rank(asked), rows)
    steps = (
        f"{real} optimizer steps an epoch instead of {intended}"
        if real != intended
        else "smaller optimizer steps"
    )
    yield error(
        "mini_batch_rounded_down",
        "silent",
        keys.MINI,
        keys.N,
        message=f"{asked.named(keys.MINI)} prompts x {samples} samples over {ranks} ranks are "
        f"{mini * samples / ranks:g} sequences a rank; verl rounds down to {rows} and says nothing: {steps}.",
    )


def _tail_is_under_weighted(asked: Asked) -> Iterator[Problem]:
    """A tail of s sequences has ceil(s / m) micro-batches, each scaled by 1 / (mini // m)."""
    rows, mini, micro = rows_per_rank(asked), mini_rows(asked), micro_rows(asked)
    if not mini or rows % mini == 0 or rows == 0:
        return
    tail, dynamic = rows % mini, asked.flag(keys.DYNAMIC)
    if not dynamic and (not micro or mini % micro):
        return  # does not start at all
    scale = tail / mini if dynamic or not micro else ceil_div(tail, micro) / (mini // micro)
    only = rows < mini
    what = (
        f"a step has {rows} sequences a rank, fewer than one mini-batch of {mini}: verl makes one short mini-batch"
        if only
        else f"a rank's {rows} sequences are not whole mini-batches of {mini}: verl's last one has {tail}"
    )
    yield (error if scale < 1 else warning)(
        "mini_batch_larger_than_step" if only else "last_mini_batch_is_short",
        "silent",
        keys.TRAIN,
        keys.MINI,
        keys.N,
        *((keys.GEN,) if asked.value(keys.GEN) is not None else ()),
        message=f"{what}, and its gradient is scaled by {scale:g}. Set {keys.short(keys.MINI)} to a divisor of the "
        "prompts of a step.",
    )


def _gen_batch_replaces_train_batch(asked: Asked) -> Iterator[Problem]:
    gen, prompts = asked.optional_count(keys.GEN), asked.count(keys.TRAIN, 1024)
    if gen is not None and gen != prompts:
        yield warning(
            "gen_batch_size_replaces_train_batch_size",
            "silent",
            keys.GEN,
            keys.TRAIN,
            message=f"{asked.named(keys.GEN)}: a step really has {gen} prompts ({sequences(asked)} sequences), not "
            f"{asked.named(keys.TRAIN)}; only recipes that filter groups collect up to the latter. Set both alike.",
        )


def _budget_can_be_exceeded(asked: Asked) -> Iterator[Problem]:
    if not asked.flag(keys.DYNAMIC):
        return
    rows, width = min(mini_rows(asked), rows_per_rank(asked)), longest(asked)
    budget = asked.count(keys.TOKENS, 16384) * sequence_parallel(asked)
    if not rows or budget < width:
        return
    made = min(rows, ceil_div(rows * width, budget))
    fullest = ceil_div(rows, made) * width
    if fullest > budget:
        yield warning(
            "token_budget_can_be_exceeded",
            "silent",
            keys.TOKENS,
            keys.PROMPT_TOKENS,
            keys.RESPONSE_TOKENS,
            message=f"verl 0.6.1 divides all tokens by the budget and does not look at single micro-batches: if all {rows} "
            f"sequences are full, {made} micro-batches hold up to {fullest} tokens, above {budget}. "
            f"Keeping the budget takes {full_micro_batches(rows, budget, width)}.",
        )


RULES: tuple[Rule, ...] = (
    *SHARED_RULES,
    loss_agg_mode("verl-0.6"),
    reward_model_micro_pair,
    lora_rank("LoRA rank in vLLM must be less than or equal to 512"),
    *SHARED_WORKER_RULES,
    _mini_batch_is_not_empty,
    _micro_divides_mini,
    _generation_splits_evenly,
    _ranks_split_evenly,
    _budgets,
    _log_prob_sizes_exist,
    _mini_batch_is_floored,
    _tail_is_under_weighted,
    _gen_batch_replaces_train_batch,
    _budget_can_be_exceeded,
)
