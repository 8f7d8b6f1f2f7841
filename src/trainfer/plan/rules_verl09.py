"""Rule set ``verl-0.9``: what verl 0.9.1 does with the sizes in its default V1 trainer.

A step is padded with synthetic sequences to a multiple of lcm(ranks, mini-batch), so that nothing
is ragged; in exchange every micro-batch and every log-prob batch must divide exactly, which is found
out after a whole rollout. ``trainer.use_v1=false`` (V0) does not pad.
"""

import math
from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked
from trainfer.plan.numbers_verl09 import (
    fetches_single_prompts,
    is_v1,
    log_prob_is_dynamic,
    mini_rows,
    mini_sequences,
    padding,
    ref_is_dynamic,
    rows_per_rank,
    sequences,
    updates_per_step,
)
from trainfer.plan.records import Problem
from trainfer.plan.verl_config_checks import SHARED_RULES, Rule, lora_rank, loss_agg_mode
from trainfer.plan.verl_sizes import (
    SEQUENCE_MEAN_MODES,
    budget_problem,
    data_parallel,
    divisors,
    error,
    uses_ref,
    warning,
)
from trainfer.plan.verl_worker_checks import SHARED_WORKER_RULES

SPLIT_MESSAGE = "data size must be divisible by force_group_size * micro_batch_size_per_gpu"


def _mode_sync_is_gone(asked: Asked) -> Iterator[Problem]:
    if asked.text(keys.MODE, "async") == "sync":
        yield error(
            "rollout_mode_sync_removed",
            "init",
            keys.MODE,
            message=f"{asked.named(keys.MODE)}: verl 0.9 has server engines only. Remove the key, or plan with "
            "--rules verl-0.6.",
            upstream="Rollout mode 'sync' has been removed. Please set `actor_rollout_ref.rollout.mode=async` or remove "
            "the mode setting entirely.",
        )


def _both_passes_are_dynamic_or_none(asked: Asked) -> Iterator[Problem]:
    actor, rollout = asked.flag(keys.DYNAMIC), log_prob_is_dynamic(asked)
    if actor != rollout:
        yield error(
            "dynamic_batches_disagree",
            "init",
            keys.DYNAMIC,
            keys.LOG_PROB_DYNAMIC,
            message=f"{asked.named(keys.DYNAMIC)} and {asked.named(keys.LOG_PROB_DYNAMIC)} must be equal in verl 0.9.",
            upstream="assert self.config.actor.use_dynamic_bsz == self.config.rollout.log_prob_use_dynamic_bsz",
        )


def _global_sizes_do_not_reach_the_engine(asked: Asked) -> Iterator[Problem]:
    for used, key, overall, when in (
        (not asked.flag(keys.DYNAMIC), keys.LOG_PROB, keys.LOG_PROB_GLOBAL, "init"),
        (not asked.flag(keys.DYNAMIC), keys.MICRO, keys.MICRO_GLOBAL, "init"),
        (uses_ref(asked) and not ref_is_dynamic(asked), keys.REF, keys.REF_GLOBAL, "run"),
    ):
        if used and asked.value(key) is None and asked.value(overall) is not None:
            upstream = {
                keys.LOG_PROB: "assert self.config.rollout.log_prob_micro_batch_size_per_gpu is not None",
                keys.MICRO: "assert self.config.actor.ppo_micro_batch_size_per_gpu is not None",
            }.get(key)
            yield error(
                "global_micro_batch_size_not_supported",
                "init" if when == "init" else "run",
                overall,
                key,
                message=f"{asked.named(overall)} passes verl's configuration check, but 0.9 reads only {key}, which is "
                "not set. Set it (sequences on one rank) and remove the old key.",
                upstream=upstream,
            )


def _generation_fetches(asked: Asked) -> Iterator[Problem]:
    gen, prompts = asked.optional_count(keys.GEN), asked.count(keys.TRAIN, 1024)
    if gen is None or not is_v1(asked) or fetches_single_prompts(asked):
        return
    if prompts % gen:
        yield error(
            "train_batch_not_whole_fetches",
            "run",
            keys.TRAIN,
            keys.GEN,
            message=f"{asked.named(keys.TRAIN)} prompts are not whole fetches of {asked.named(keys.GEN)}. "
            f"Set {keys.short(keys.GEN)} to one of {divisors(prompts)}, or leave it out.",
            upstream=f"num_prompts ({prompts}) must be a positive multiple of gen_batch_size ({gen}); "
            "it is submitted in whole gen_batch_size dataloader fetches.",
        )


def _step_holds_whole_updates(asked: Asked) -> Iterator[Problem]:
    prompts, updates = asked.count(keys.TRAIN, 1024), updates_per_step(asked)
    if prompts % updates:
        yield error(
            "train_batch_not_divisible_by_sync_step",
            "run",
            keys.TRAIN,
            keys.SYNC_EVERY,
            message=f"{asked.named(keys.TRAIN)} prompts are not {asked.named(keys.SYNC_EVERY)} equal updates.",
            upstream=f"train_batch_size ({prompts}) must be divisible by parameter_sync_step ({updates})",
        )


def _mini_batch_splits_over_ranks(asked: Asked) -> Iterator[Problem]:
    total, ranks = mini_sequences(asked), data_parallel(asked)
    if total % ranks:
        samples = asked.count(keys.N, 1)
        step = ranks // math.gcd(ranks, samples)
        mini = asked.count(keys.MINI, 256)
        yield error(
            "mini_batch_not_divisible_by_ranks",
            "run",
            keys.MINI,
            keys.N,
            message=f"{asked.named(keys.MINI)} prompts x {samples} samples = {total} sequences do not split evenly over "
            f"{ranks} data-parallel ranks ({mini} x {samples} // {ranks} = {total // ranks}). "
            f"{keys.short(keys.MINI)} must be a multiple of {step}; the smallest is {step}.",
            upstream=f"Got mini_batch_size={total} and self.engine.get_data_parallel_size()={ranks}",
        )


def _rows_are_whole_mini_batches(asked: Asked) -> Iterator[Problem]:
    rows, mini = rows_per_rank(asked), mini_rows(asked)
    if not is_v1(asked) and mini and rows % mini:
        yield error(
            "step_not_whole_mini_batches",
            "run",
            keys.TRAIN,
            keys.MINI,
            message=f"a rank's {rows} sequences are not whole mini-batches of {mini}; the V0 trainer does not pad.",
            upstream=f"{rows} % {mini} != 0",
        )


def _micro_divides_mini(asked: Asked) -> Iterator[Problem]:
    mini, micro = mini_rows(asked), asked.optional_count(keys.MICRO)
    if asked.flag(keys.DYNAMIC) or mini is None or micro is None:
        return
    if mini % micro:
        yield error(
            "mini_batch_not_divisible_by_micro",
            "run",
            keys.MICRO,
            keys.MINI,
            keys.N,
            message=f"a rank's mini-batch of {mini} sequences ({asked.named(keys.MINI)} x {asked.count(keys.N, 1)} samples "
            f"over {data_parallel(asked)} ranks) is not whole micro-batches of {asked.named(keys.MICRO)}; verl finds out "
            f"after the rollout. Allowed micro-batch sizes: {divisors(mini)}.",
            upstream=SPLIT_MESSAGE,
        )


def _log_prob_divides_rows(asked: Asked) -> Iterator[Problem]:
    rows = rows_per_rank(asked)
    for used, key, what in (
        (not asked.flag(keys.DYNAMIC), keys.LOG_PROB, "old log-probs"),
        (uses_ref(asked) and not ref_is_dynamic(asked), keys.REF, "reference log-probs"),
    ):
        size = asked.optional_count(key) if used else None
        if size is not None and rows % size:
            yield error(
                "log_prob_batch_not_divisible",
                "run",
                key,
                message=f"{what}: a rank's {rows} sequences are not whole batches of {asked.named(key)}; verl finds out "
                f"after the rollout. Allowed sizes: {divisors(rows)}.",
                upstream=SPLIT_MESSAGE,
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


def _padding_is_told(asked: Asked) -> Iterator[Problem]:
    pad, real = padding(asked), sequences(asked)
    if not pad or mini_rows(asked) is None:
        return
    mode = asked.text(keys.LOSS_AGG, "token-mean")
    diluted = mode in SEQUENCE_MEAN_MODES
    effect = (
        f"with {keys.short(keys.LOSS_AGG)}={mode} they count in the mean: the gradient is scaled by "
        f"{real / (real + pad):g}"
        if diluted
        else "they carry no loss, but cost a short forward and backward each"
    )
    yield (error if diluted else warning)(
        "synthetic_padding",
        "silent",
        keys.TRAIN,
        keys.MINI,
        keys.N,
        message=f"{real} sequences are not whole mini-batches of {mini_sequences(asked)} on {data_parallel(asked)} ranks: "
        f"verl adds {pad} synthetic sequences to make {real + pad}; {effect}. Set {keys.short(keys.MINI)} to a divisor "
        f"of {keys.short(keys.TRAIN)}.",
    )


def _balance_cannot_be_turned_off(asked: Asked) -> Iterator[Problem]:
    if is_v1(asked) and keys.BALANCE in asked.given and not asked.flag(keys.BALANCE, default=True):
        yield warning(
            "balance_batch_ignored",
            "silent",
            keys.BALANCE,
            message=f"{asked.named(keys.BALANCE)} has no effect in the V1 trainer: sequences are always reordered over "
            f"ranks. Only {keys.V1}=false honours it.",
        )


RULES: tuple[Rule, ...] = (
    *SHARED_RULES,
    loss_agg_mode("verl-0.9"),
    lora_rank("lora_rank must be less than or equal to 512, but got {rank}"),
    *SHARED_WORKER_RULES,
    _mode_sync_is_gone,
    _both_passes_are_dynamic_or_none,
    _global_sizes_do_not_reach_the_engine,
    _generation_fetches,
    _step_holds_whole_updates,
    _mini_batch_splits_over_ranks,
    _rows_are_whole_mini_batches,
    _micro_divides_mini,
    _log_prob_divides_rows,
    _budgets,
    _padding_is_told,
    _balance_cannot_be_turned_off,
)
