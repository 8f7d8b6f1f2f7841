"""The three rule sets under one face: numbers, rules, notes, checklist."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trainfer.plan import (
    keys,
    numbers_trainfer,
    numbers_verl06,
    numbers_verl09,
    rules_trainfer,
    rules_verl06,
    rules_verl09,
    value_checks,
)
from trainfer.plan.alignment import alignment
from trainfer.plan.asked import Asked, known
from trainfer.plan.records import Alignment, Derived, Problem

Rules = Literal["verl-0.6", "verl-0.9", "trainfer"]


def _as_it_is(asked: Asked) -> Asked:
    return asked


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSet:
    """What one system does with the sizes."""

    name: Rules
    system: str
    """With its release, for people."""
    rules: tuple[Callable[[Asked], Iterator[Problem]], ...]
    derived: Callable[[Asked], Derived]
    notes: Callable[[Asked], Iterator[str]]
    alignment: Callable[[Asked, Mapping[str, str]], Alignment]
    settled: Callable[[Asked], Asked] = _as_it_is
    """Fills in switches that follow other keys where nobody set them."""


def _plain(asked: Asked, environment: Mapping[str, str]) -> Alignment:
    return alignment(asked, environment=environment)


def _ragged(asked: Asked, environment: Mapping[str, str]) -> Alignment:
    return alignment(asked, environment=environment, ragged=True)


def _always_balanced(asked: Asked, environment: Mapping[str, str]) -> Alignment:
    v1 = known(lambda: numbers_verl09.is_v1(asked)) is not False
    remark = (
        f"cannot be met: the V1 trainer always reorders; only {keys.V1}=false honours the key" if v1 else ""
    )
    return alignment(asked, environment=environment, balance_remark=remark)


RULE_SETS: dict[Rules, RuleSet] = {
    "verl-0.6": RuleSet(
        name="verl-0.6",
        system="verl 0.6.1, FSDP workers",
        rules=(*value_checks.RULES, *rules_verl06.RULES),
        derived=numbers_verl06.derived,
        notes=numbers_verl06.notes,
        alignment=_plain,
    ),
    "verl-0.9": RuleSet(
        name="verl-0.9",
        system="verl 0.9.1, V1 trainer",
        rules=(*value_checks.RULES, *rules_verl09.RULES),
        derived=numbers_verl09.derived,
        notes=numbers_verl09.notes,
        alignment=_always_balanced,
    ),
    "trainfer": RuleSet(
        name="trainfer",
        system="trainfer",
        rules=(*value_checks.RULES, *rules_trainfer.RULES),
        derived=numbers_trainfer.derived,
        notes=numbers_trainfer.notes,
        alignment=_ragged,
        settled=numbers_trainfer.settled,
    ),
}
