"""A plan as plain data: the ``trainfer.plan/1`` document of ``--json`` and of a run folder's ``plan.json``."""

from dataclasses import asdict, fields

from trainfer.plan.records import Derived, Number, Plan, Span, ValueRow

SCHEMA = "trainfer.plan/1"


def plan_document(plan: Plan) -> dict[str, object]:
    """The document; strict JSON (no NaN), insertion order is meant."""
    return {
        "schema": SCHEMA,
        "rules": plan.rules,
        "system": plan.system,
        "rules_reason": plan.reason,
        "ok": plan.ok,
        "values": {key: _row(row) for key, row in plan.values.items()},
        "derived": derived_document(plan.derived),
        "problems": [
            {
                "severity": problem.severity,
                "when": problem.when,
                "code": problem.code,
                "keys": list(problem.keys),
                "message": problem.message,
                "upstream_message": problem.upstream_message,
                "suggestions": [dict(changes) for changes in problem.suggestions],
            }
            for problem in plan.problems
        ],
        "alignment": {
            "ready": plan.alignment.ready,
            "conditions": [
                {
                    "name": condition.name,
                    "keys": list(condition.keys),
                    "value": condition.value,
                    "required": condition.required,
                    "ok": condition.ok,
                    "remark": condition.remark,
                }
                for condition in plan.alignment.conditions
            ],
        },
        "tensors": [
            {"stage": t.stage, "name": t.name, "shape": list(t.shape), "layout": t.layout}
            for t in plan.tensors
        ],
        "memory": None if plan.memory is None else asdict(plan.memory),
        "notes": list(plan.notes),
    }


def derived_document(derived: Derived) -> dict[str, object]:
    """Every name is present: a number, ``{"min": …, "max": …}``, or null."""
    numbers: dict[str, Number] = {field.name: getattr(derived, field.name) for field in fields(derived)}
    return {
        name: {"min": number.min, "max": number.max} if isinstance(number, Span) else number
        for name, number in numbers.items()
    }


def _row(row: ValueRow) -> dict[str, object]:
    document: dict[str, object] = {"value": _finite(row.value), "source": row.source}
    if row.beaten:
        document["beats"] = list(row.beaten)
    if row.unknown is not None:
        document["unknown"] = row.unknown
    return document


def _finite(value: object) -> object:
    """NaN and infinities as text, which JSON does not have."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
