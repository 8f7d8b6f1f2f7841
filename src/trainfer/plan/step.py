"""The numbers that ``trainfer train`` runs: a validated configuration in, a :class:`StepPlan` out."""

from collections.abc import Iterator, Mapping
from typing import cast

import msgspec

from trainfer.config.schema import TrainConfig
from trainfer.errors import PlanError
from trainfer.plan import numbers_trainfer, rules_trainfer
from trainfer.plan.asked import Asked
from trainfer.plan.records import Problem, StepPlan, Value


def plan_step(config: TrainConfig) -> StepPlan:
    """Work out one training step under trainfer's own rules.

    Raises:
        PlanError: the sizes do not fit together; the message lists every problem.
    """
    asked = Asked(values=dict(_leaves(msgspec.to_builtins(config))))
    problems = [problem for problem in rules_trainfer.problems(asked) if problem.severity == "error"]
    if problems:
        raise PlanError(describe(problems))
    return numbers_trainfer.step_plan(asked)


def describe(problems: list[Problem]) -> str:
    """All problems as one message, one line each."""
    title = "the batch sizes do not fit together:" if len(problems) > 1 else "a batch size does not fit:"
    return "\n  - ".join([title, *(problem.message for problem in problems)])


def _leaves(node: object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    if isinstance(node, Mapping):
        for name, child in cast("Mapping[str, object]", node).items():
            yield from _leaves(child, f"{prefix}.{name}" if prefix else name)
    elif node is None or isinstance(node, (str, int, float, bool)):
        yield prefix, node
