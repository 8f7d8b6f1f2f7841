"""What rule set ``trainfer`` takes from the schema of training: defaults, unknown keys, refused values."""

from collections.abc import Iterator

from trainfer.config.keys import default_values
from trainfer.config.problems import find_entry, find_problems
from trainfer.config.settings import Settings
from trainfer.plan import keys
from trainfer.plan.question import NotStatic
from trainfer.plan.records import Problem


def schema_defaults() -> dict[str, object]:
    """Dotted key -> default."""
    return dict(default_values())


def schema_problems(settings: Settings) -> Iterator[Problem]:
    """Unknown keys and refused values; keys of verl's that training does not honour may stand in a plan."""
    given = {key: s for key, s in settings.given().items() if not isinstance(s.value, NotStatic)}
    typed = {*keys.COUNTS, *keys.FLAGS, *keys.WHOLES}
    for problem in find_problems(given):
        if problem.setting is not None and problem.key not in typed and find_entry(problem.key) is None:
            yield Problem(
                severity="error", when="config", code="config", keys=(problem.key,), message=str(problem)
            )
