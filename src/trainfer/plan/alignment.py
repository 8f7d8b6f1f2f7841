"""msProbe's shape-alignment checklist: what its recipe demands before two dumps can be matched by shape.

trainfer's own capture needs none of it: rows are joined by token prefix. The list is for those who
use the recipe.
"""

from collections.abc import Mapping

from trainfer.plan import keys
from trainfer.plan.asked import Asked, known
from trainfer.plan.records import Alignment, Condition, Value
from trainfer.plan.verl_sizes import data_parallel

ENVIRONMENT = "TORCHDYNAMO_DISABLE"


def alignment(
    asked: Asked, *, environment: Mapping[str, str], balance_remark: str = "", ragged: bool = False
) -> Alignment:
    """The checklist for one input.

    Args:
        asked: Values; conditions on values that are not known fail.
        environment: Variables that reach the training processes, as far as known.
        balance_remark: Why balancing cannot be turned off under this rule set; empty where it can.
        ragged: True where a micro-batch size need not divide the mini-batch.
    """
    balanced = known(lambda: asked.flag(keys.BALANCE, default=True))
    return Alignment(
        conditions=(
            _condition("mini_batch_num", (keys.TRAIN, keys.MINI), known(lambda: _mini_batches(asked)), 1),
            _condition(
                "gradient_accumulation",
                (keys.MINI, keys.N, keys.MICRO),
                known(lambda: _accumulation(asked, ragged=ragged)),
                1,
            ),
            _condition(
                "use_remove_padding",
                (keys.REMOVE_PADDING,),
                known(lambda: asked.flag(keys.REMOVE_PADDING)),
                required=True,
            ),
            _condition(
                "use_dynamic_bsz", (keys.DYNAMIC,), known(lambda: asked.flag(keys.DYNAMIC)), required=False
            ),
            Condition(
                name="balance_batch",
                keys=(keys.BALANCE,),
                value=True if balance_remark else balanced,
                required=False,
                ok=not balance_remark and balanced is False,
                remark=balance_remark,
            ),
            _environment(environment),
        )
    )


def _condition(name: str, names: tuple[str, ...], value: Value, required: Value) -> Condition:
    return Condition(name=name, keys=names, value=value, required=required, ok=value == required)


def _environment(environment: Mapping[str, str]) -> Condition:
    value = environment.get(ENVIRONMENT)
    return Condition(
        name=ENVIRONMENT,
        keys=(),
        value=value,
        required="1",
        ok=value == "1",
        remark="also set DUMP_ON=1 and PROMPTS_ONLY=1 for the recipe's own switches",
    )


def _mini_batches(asked: Asked) -> Value:
    return _ratio(asked.count(keys.TRAIN), asked.count(keys.MINI))


def _accumulation(asked: Asked, *, ragged: bool) -> Value:
    rows = asked.count(keys.MINI) * asked.count(keys.N, 1)
    together = asked.count(keys.MICRO) * data_parallel(asked)
    return -(-rows // together) if ragged else _ratio(rows, together)


def _ratio(number: int, divisor: int) -> Value:
    """A whole number where it is one."""
    return number // divisor if number % divisor == 0 else number / divisor
