"""Values of the wrong kind: text or 0 where a positive whole number belongs. The same for all rule sets."""

from collections.abc import Iterator

from trainfer.plan import keys
from trainfer.plan.asked import MAX_COUNT, Asked, shown
from trainfer.plan.records import Problem, Value

_NEVER_NULL = (
    keys.TRAIN, keys.MINI, keys.N, keys.TP, keys.EPOCHS, keys.GPUS, keys.NODES, keys.PROMPT_TOKENS,
    keys.RESPONSE_TOKENS,
)  # fmt: skip
_UPSTREAM_OF_ZERO = {
    keys.MICRO: "integer modulo by zero",
    keys.LOG_PROB: "range() arg 3 must not be zero",
    keys.REF: "range() arg 3 must not be zero",
}


def counts(asked: Asked) -> Iterator[Problem]:
    """Positive whole numbers."""
    for key in keys.COUNTS:
        if key in asked.unknown or key not in asked.values:
            continue
        value = asked.values[key]
        if value is None:
            if key in _NEVER_NULL:
                yield _wrong(key, value, "must be given")
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            late = value == 0 and key in (keys.LOG_PROB, keys.REF)
            yield Problem(
                severity="error",
                when="run" if late else "config",
                code="not_a_positive_whole_number",
                keys=(key,),
                message=f"{key}={shown(value)} is not a positive whole number (at most {MAX_COUNT}).",
                upstream_message=_UPSTREAM_OF_ZERO.get(key) if value == 0 else None,
            )


def flags_and_wholes(asked: Asked) -> Iterator[Problem]:
    """True or false; whole numbers of either sign."""
    for key in keys.FLAGS:
        value = None if key in asked.unknown else asked.values.get(key)
        if value is not None and not isinstance(value, bool):
            yield _wrong(key, value, "must be true or false")
    for key in keys.WHOLES:
        value = None if key in asked.unknown else asked.values.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_COUNT
        ):
            yield _wrong(key, value, "must be a whole number")


def _wrong(key: str, value: Value, rule: str) -> Problem:
    return Problem(
        severity="error",
        when="config",
        code="wrong_kind_of_value",
        keys=(key,),
        message=f"{key}={shown(value)} {rule}.",
    )


RULES = (counts, flags_and_wholes)
