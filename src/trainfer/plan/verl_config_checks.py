"""What verl's own configuration check refuses, in its order; the same in 0.6.1 and 0.9.1 but for four lines.

verl stops at the first of these; here all are found at once. Each function is one rule.
"""

from collections.abc import Callable, Iterator

from trainfer.plan import keys
from trainfer.plan.asked import Asked
from trainfer.plan.records import Problem
from trainfer.plan.verl_sizes import (
    ceil_div,
    critic_was_chosen,
    data_parallel,
    error,
    gpus,
    is_megatron,
    model_parallel,
    uses_critic,
    uses_ref,
    warning,
)

Rule = Callable[[Asked], Iterator[Problem]]


def total_divides(asked: Asked) -> Iterator[Problem]:
    """Prompts x samples against the number of GPUs (not of data-parallel ranks), or Megatron's dp x micro."""
    if asked.flag(keys.DYNAMIC):
        return
    world, prompts, samples = gpus(asked), asked.count(keys.TRAIN, 1024), asked.count(keys.N, 1)
    if is_megatron(asked):
        model, context = (
            model_parallel(asked) // asked.count(keys.MEGATRON_CP, 1),
            asked.count(keys.MEGATRON_CP, 1),
        )
        if world % (model * context):
            yield error(
                "gpus_not_divisible_by_model_parallel",
                "config",
                keys.MEGATRON_TP,
                keys.MEGATRON_PP,
                keys.MEGATRON_CP,
                message=f"{world} GPUs are not whole copies of the model, which spans {model} x {context} GPUs.",
                upstream=f"n_gpus ({world}) must be divisible by model_parallel_size ({model}) times "
                f"context_parallel_size ({context})",
            )
            return
        smallest = data_parallel(asked) * asked.count(keys.MICRO)
        rule = f"{data_parallel(asked)} data-parallel ranks x {asked.named(keys.MICRO)}"
    else:
        smallest, rule = world, f"{world} GPUs"
    total = prompts * samples
    if total % smallest:
        yield error(
            "total_not_divisible",
            "config",
            keys.TRAIN,
            keys.N,
            message=f"{asked.named(keys.TRAIN)} prompts x {asked.named(keys.N)} samples = {total} sequences; verl wants "
            f"a multiple of {smallest} ({rule}). The nearest totals are {total // smallest * smallest} and "
            f"{ceil_div(total, smallest) * smallest}.",
            upstream=f"real_train_batch_size ({total}) must be divisible by minimal possible batch size ({smallest})",
        )


def actor_micro_pair(asked: Asked) -> Iterator[Problem]:
    """Exactly one of the two micro-batch keys, unless batches are dynamic."""
    if asked.flag(keys.DYNAMIC):
        return
    both = (
        asked.optional_count(keys.MICRO) is not None and asked.optional_count(keys.MICRO_GLOBAL) is not None
    )
    if both:
        yield error(
            "micro_batch_size_set_twice",
            "config",
            keys.MICRO_GLOBAL,
            keys.MICRO,
            message=f"{asked.named(keys.MICRO_GLOBAL)} (all GPUs, deprecated) and {asked.named(keys.MICRO)} are both "
            "set. Remove the first.",
            upstream="[actor] You have set both 'actor.ppo_micro_batch_size' AND 'actor.ppo_micro_batch_size_per_gpu'. "
            "Please remove 'actor.ppo_micro_batch_size' because only '*_ppo_micro_batch_size_per_gpu' is "
            "supported (the former is deprecated).",
        )
    elif asked.optional_count(keys.MICRO) is None and asked.optional_count(keys.MICRO_GLOBAL) is None:
        yield error(
            "micro_batch_size_missing",
            "config",
            keys.MICRO,
            message=f"{keys.MICRO} is not set and {keys.DYNAMIC} is off: nothing says how many sequences share a "
            "forward and backward on one rank.",
            upstream="[actor] Please set at least one of 'actor.ppo_micro_batch_size' or "
            "'actor.ppo_micro_batch_size_per_gpu' if use_dynamic_bsz is not enabled.",
        )


LOSS_AGG_MODES = {
    "verl-0.6": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "verl-0.9": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
}


def loss_agg_mode(rules: str) -> Rule:
    """The rule for one release: 0.9 knows token-sum too."""

    def check(asked: Asked) -> Iterator[Problem]:
        mode, known = asked.text(keys.LOSS_AGG, "token-mean"), LOSS_AGG_MODES[rules]
        if mode not in known:
            yield error(
                "loss_agg_mode_unknown",
                "config",
                keys.LOSS_AGG,
                message=f"{asked.named(keys.LOSS_AGG)} is none of {', '.join(known)}.",
                upstream=f"Invalid loss_agg_mode: {mode}",
            )

    return check


def train_holds_a_mini_batch(asked: Asked) -> Iterator[Problem]:
    """Both count prompts; tested only where batches are not dynamic."""
    prompts, mini = asked.count(keys.TRAIN, 1024), asked.count(keys.MINI, 256)
    if not asked.flag(keys.DYNAMIC) and prompts < mini:
        samples = asked.count(keys.N, 1)
        yield error(
            "train_batch_smaller_than_mini_batch",
            "config",
            keys.TRAIN,
            keys.MINI,
            message=f"{asked.named(keys.TRAIN)} prompts a step are fewer than {asked.named(keys.MINI)} prompts of one "
            f"optimizer step. The mini-batch counts prompts, not sequences ({mini} prompts are {mini * samples} "
            f"sequences). Set it to {prompts} for one optimizer step a step, or to a divisor of {prompts}.",
            upstream=f"train_batch_size ({prompts}) must be >= actor.ppo_mini_batch_size ({mini})",
        )


def global_micro_size(asked: Asked) -> Iterator[Problem]:
    """The deprecated micro-batch size over all GPUs."""
    micro = asked.optional_count(keys.MICRO_GLOBAL)
    if micro is None or asked.flag(keys.DYNAMIC):
        return
    mini, world, sp = asked.count(keys.MINI, 256), gpus(asked), asked.count(keys.SP, 1)
    if mini % micro:
        yield error(
            "mini_batch_not_divisible_by_global_micro",
            "config",
            keys.MINI,
            keys.MICRO_GLOBAL,
            message=f"{asked.named(keys.MINI)} is not a multiple of {asked.named(keys.MICRO_GLOBAL)} (deprecated, over "
            f"all GPUs). Use {keys.short(keys.MICRO)} instead.",
            upstream=f"ppo_mini_batch_size ({mini}) must be divisible by ppo_micro_batch_size ({micro})",
        )
    if micro * sp < world:
        yield error(
            "global_micro_smaller_than_gpus",
            "config",
            keys.MICRO_GLOBAL,
            message=f"{asked.named(keys.MICRO_GLOBAL)} (deprecated, over all GPUs) x sequence-parallel size {sp} is less "
            f"than one sequence a GPU ({world} GPUs). Use {keys.short(keys.MICRO)} instead.",
            upstream=f"ppo_micro_batch_size ({micro}) * ulysses_sequence_parallel_size ({sp}) must be >= n_gpus ({world})",
        )


def sequence_parallel_needs_packing(asked: Asked) -> Iterator[Problem]:
    """Ulysses splits packed rows only."""
    size = asked.count(keys.SP, 1)
    if not is_megatron(asked) and size > 1 and not asked.flag(keys.REMOVE_PADDING):
        yield error(
            "sequence_parallel_without_remove_padding",
            "config",
            keys.SP,
            keys.REMOVE_PADDING,
            message=f"{asked.named(keys.SP)} splits packed rows, but {asked.named(keys.REMOVE_PADDING)}. Set it to true.",
            upstream="When using sequence parallelism for actor/ref policy, you must enable `use_remove_padding`.",
        )


def log_prob_micro_pairs(asked: Asked) -> Iterator[Problem]:
    """Exactly one of two keys for the reference pass (where it is used) and the old-log-prob pass."""
    if asked.flag(keys.DYNAMIC):
        return
    roles = [("actor_rollout_ref.rollout", keys.LOG_PROB, keys.LOG_PROB_GLOBAL)]
    if uses_ref(asked):
        roles.insert(0, ("actor_rollout_ref.ref", keys.REF, keys.REF_GLOBAL))
    for name, per_gpu, overall in roles:
        yield from _pair(asked, name, per_gpu, overall, param="log_prob_micro_batch_size")


def reward_model_micro_pair(asked: Asked) -> Iterator[Problem]:
    """0.6.1 only: the same for a reward model."""
    if asked.flag(keys.REWARD_MODEL) and not asked.flag(keys.REWARD_MODEL_DYNAMIC):
        yield from _pair(
            asked,
            "reward_model",
            keys.REWARD_MODEL_MICRO,
            keys.REWARD_MODEL_MICRO_GLOBAL,
            param="micro_batch_size",
        )


def _pair(asked: Asked, name: str, per_gpu: str, overall: str, *, param: str) -> Iterator[Problem]:
    has_per_gpu, has_overall = asked.value(per_gpu) is not None, asked.value(overall) is not None
    if not has_per_gpu and not has_overall:
        yield error(
            "log_prob_micro_batch_size_missing",
            "config",
            per_gpu,
            message=f"{per_gpu} is not set: nothing says how many sequences share a forward on one rank.",
            upstream=f"[{name}] Please set at least one of '{name}.{param}' or '{name}.{param}_per_gpu'.",
        )
    elif has_per_gpu and has_overall:
        yield error(
            "log_prob_micro_batch_size_set_twice",
            "config",
            overall,
            per_gpu,
            message=f"{asked.named(overall)} (all GPUs, deprecated) and {asked.named(per_gpu)} are both set. "
            "Remove the first.",
            upstream=f"[{name}] You have set both '{name}.{param}' AND '{name}.{param}_per_gpu'. Please remove "
            f"'{name}.{param}' because only '*_{param}_per_gpu' is supported (the former is deprecated).",
        )


def critic(asked: Asked) -> Iterator[Problem]:
    """The critic's own family of rules; only warnings where nobody asked for a critic."""
    if not uses_critic(asked) or asked.flag(keys.CRITIC_DYNAMIC, default=asked.flag(keys.DYNAMIC)):
        return
    report = error if critic_was_chosen(asked) else warning
    hint = "" if critic_was_chosen(asked) else (
        f" verl trains a critic here only because {keys.ADVANTAGE} is left at gae; set it to grpo."
    )  # fmt: skip
    micro, overall = asked.optional_count(keys.CRITIC_MICRO), asked.optional_count(keys.CRITIC_MICRO_GLOBAL)
    mini, prompts = asked.count(keys.CRITIC_MINI, asked.count(keys.MINI, 256)), asked.count(keys.TRAIN, 1024)
    if micro is None and overall is None:
        yield report(
            "critic_micro_batch_size_missing",
            "config",
            keys.CRITIC_MICRO,
            keys.ADVANTAGE,
            message=f"{keys.CRITIC_MICRO} is not set.{hint}",
            upstream="[critic] Please set at least one of 'critic.micro_batch_size' or "
            "'critic.micro_batch_size_per_gpu'.",
        )
    if micro is not None and overall is not None and keys.CRITIC_MICRO in asked.given:
        yield report(
            "critic_micro_batch_size_set_twice",
            "config",
            keys.CRITIC_MICRO_GLOBAL,
            keys.CRITIC_MICRO,
            message=f"{asked.named(keys.CRITIC_MICRO_GLOBAL)} and {asked.named(keys.CRITIC_MICRO)} are both set. Remove "
            f"the first.{hint}",
            upstream="[critic] You have set both 'critic.micro_batch_size' AND 'critic.micro_batch_size_per_gpu'. Please "
            "remove 'critic.micro_batch_size' because only '*_micro_batch_size_per_gpu' is supported (the former is "
            "deprecated).",
        )
    if overall is not None and mini % overall:
        yield report(
            "critic_mini_batch_not_divisible_by_global_micro",
            "config",
            keys.CRITIC_MINI,
            keys.CRITIC_MICRO_GLOBAL,
            message=f"{asked.named(keys.CRITIC_MINI)} is not a multiple of {asked.named(keys.CRITIC_MICRO_GLOBAL)}.{hint}",
            upstream=f"[critic] ppo_mini_batch_size ({mini}) must be divisible by ppo_micro_batch_size ({overall})",
        )
    if prompts < mini and keys.CRITIC_MINI in asked.given:
        yield report(
            "train_batch_smaller_than_critic_mini_batch",
            "config",
            keys.TRAIN,
            keys.CRITIC_MINI,
            message=f"{asked.named(keys.TRAIN)} prompts a step are fewer than {asked.named(keys.CRITIC_MINI)}.{hint}",
            upstream=f"train_batch_size ({prompts}) must be >= critic.ppo_mini_batch_size ({mini})",
        )


def validation_temperature(asked: Asked) -> Iterator[Problem]:
    """Sampling in validation is checked against the training temperature."""
    temperature = asked.value(keys.TEMPERATURE)
    if asked.flag(keys.VAL_SAMPLE) and isinstance(temperature, (int, float)) and temperature <= 0:
        yield error(
            "validation_temperature",
            "config",
            keys.TEMPERATURE,
            keys.VAL_SAMPLE,
            message=f"{asked.named(keys.VAL_SAMPLE)} samples in validation, but {asked.named(keys.TEMPERATURE)}.",
            upstream="validation gen temperature should be greater than 0 when enabling do_sample",
        )


def lora_rank(upstream: str) -> Rule:
    """VLLM's limit; each release says it in its own words (``{rank}`` is filled in)."""

    def check(asked: Asked) -> Iterator[Problem]:
        rank = asked.whole(keys.LORA_RANK, 0)
        if rank > 512 and asked.text(keys.ENGINE) == "vllm":
            yield error(
                "lora_rank_above_engine_limit",
                "config",
                keys.LORA_RANK,
                message=f"{asked.named(keys.LORA_RANK)} is above vLLM's limit of 512.",
                upstream=upstream.format(rank=rank),
            )

    return check


SHARED_RULES: tuple[Rule, ...] = (
    total_divides,
    actor_micro_pair,
    train_holds_a_mini_batch,
    global_micro_size,
    sequence_parallel_needs_packing,
    log_prob_micro_pairs,
    critic,
    validation_temperature,
)
