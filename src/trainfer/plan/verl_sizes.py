"""Sizes that both verl rule sets share: ranks, roles, widths; and small arithmetic for messages.

verl 0.6.1 means its FSDP workers, 0.9.1 its default V1 trainer. Every function reads
:class:`Asked` and may raise ``NotKnown``.
"""

import functools
import math

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown
from trainfer.plan.records import Number, Problem, Span, Value, When

SEQUENCE_MEAN_MODES = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def error(code: str, when: When, *names: str, message: str, upstream: str | None = None) -> Problem:
    """A problem that stops the run, or spoils it in silence."""
    return Problem(
        severity="error", when=when, code=code, keys=names, message=message, upstream_message=upstream
    )


def warning(code: str, when: When, *names: str, message: str, upstream: str | None = None) -> Problem:
    """A problem that loses nothing but should be known."""
    return Problem(
        severity="warning", when=when, code=code, keys=names, message=message, upstream_message=upstream
    )


def gpus(asked: Asked) -> int:
    """All GPUs of the run."""
    return asked.count(keys.GPUS, 8) * asked.count(keys.NODES, 1)


def is_megatron(asked: Asked) -> bool:
    """True when Megatron trains instead of FSDP."""
    return asked.text(keys.STRATEGY, "fsdp") == "megatron"


def sequence_parallel(asked: Asked) -> int:
    """Ulysses size: the actor's key, else (0.9) the one below ``fsdp_config``; 1 under Megatron."""
    if is_megatron(asked):
        return 1
    size = asked.count(keys.SP, 1)
    return size if size > 1 else asked.count(keys.SP_FSDP, 1)


def model_parallel(asked: Asked) -> int:
    """GPUs that hold the same sequences while training."""
    if is_megatron(asked):
        return (
            asked.count(keys.MEGATRON_TP, 1)
            * asked.count(keys.MEGATRON_PP, 1)
            * asked.count(keys.MEGATRON_CP, 1)
        )
    return sequence_parallel(asked)


def data_parallel(asked: Asked) -> int:
    """Ranks that hold different sequences. Unlike verl it is never 0: a world too small is a problem of its own."""
    size = gpus(asked) // model_parallel(asked)
    if size < 1:
        raise NotKnown(keys.SP)
    return size


def engine_gpus(asked: Asked) -> int:
    """GPUs of one rollout engine."""
    return asked.count(keys.TP, 2) * asked.count(keys.ROLLOUT_DP, 1) * asked.count(keys.ROLLOUT_PP, 1)


def replicas(asked: Asked) -> int:
    """Rollout engines that generate at the same time; not known where the GPUs are not whole engines."""
    count, rest = divmod(gpus(asked), engine_gpus(asked))
    if rest or not count:
        raise NotKnown(keys.TP)
    return count


def longest(asked: Asked) -> int:
    """Tokens of the longest prompt and response together: the padded width."""
    return asked.count(keys.PROMPT_TOKENS, 512) + asked.count(keys.RESPONSE_TOKENS, 512)


def uses_ref(asked: Asked) -> bool:
    """True when one of the two KL terms needs the reference model."""
    return asked.flag(keys.KL_LOSS) or asked.flag(keys.KL_REWARD)


def uses_critic(asked: Asked) -> bool:
    """Verl's rule: ``critic.enable`` where it is set, else the advantage estimator gae."""
    enabled = asked.value(keys.CRITIC)
    if isinstance(enabled, bool):
        return enabled
    return asked.text(keys.ADVANTAGE, "gae") == "gae"


def critic_was_chosen(asked: Asked) -> bool:
    """False where the critic is on only because nobody named an advantage estimator."""
    return keys.CRITIC in asked.given or keys.ADVANTAGE in asked.given


@functools.lru_cache(maxsize=1024)
def divisors(number: int, *, limit: int = 64) -> str:
    """``1, 2, 3, 6``: what divides ``number``; the smallest ``limit`` of them."""
    small = [size for size in range(1, min(math.isqrt(number), 10_000) + 1) if number % size == 0]
    large = [number // size for size in reversed(small) if size * size != number]
    found = small + (large if math.isqrt(number) <= 10_000 else [])
    return ", ".join(map(str, found[:limit]))


def many(number: int, thing: str) -> str:
    """``1 GPU``, ``6 GPUs``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def ceil_div(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def budget_problem(asked: Asked, key: str, *, what: str) -> Problem | None:
    """A token budget that does not hold the longest sequence; verl multiplies it by the Ulysses size."""
    sp, width = sequence_parallel(asked), longest(asked)
    budget = asked.count(key, 16384)
    if budget * sp >= width:
        return None
    return error(
        "token_budget_smaller_than_sequence",
        "run",
        key,
        keys.PROMPT_TOKENS,
        keys.RESPONSE_TOKENS,
        message=f"{what}: {asked.named(key)} x sequence-parallel size {sp} = {budget * sp} tokens do not hold the "
        f"longest sequence, {keys.PROMPT_TOKENS} + {keys.RESPONSE_TOKENS} = {width} tokens. "
        f"Set it to at least {ceil_div(width, sp)}.",
        upstream=f"max_token_len must be greater than the sequence length. Got max_token_len={budget * sp} and "
        f"max_seq_len={width}",
    )


def full_micro_batches(rows: int, budget: int, width: int) -> int:
    """Micro-batches of ``rows`` sequences that are all ``width`` tokens long, none above the budget."""
    return ceil_div(rows, max(1, budget // width))


def between(low: int, high: int) -> Number:
    """A span, or the number itself where both ends agree."""
    return low if low == high else Span(min=low, max=high)


def as_value(number: Number) -> Value:
    """A number as a single value; None where it is a span."""
    return number if isinstance(number, int) else None
