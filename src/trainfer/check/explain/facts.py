"""What either side says of itself: its modules' attributes, its configuration, how its calls were laid out.

Takes sides' manifests and call records; gives plain records, and the attributes that decide a module's maths and differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from trainfer.check.align.names import NameMap, canonical, parent_of
from trainfer.check.align.side import Side
from trainfer.check.dump.records import ModuleEntry, RowLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFacts:
    """One side."""

    modules: Mapping[str, ModuleEntry]
    """By canonical name."""
    config: Mapping[str, object]
    layouts: frozenset[str]
    """How rows were laid out: ``padded``, ``packed``, ``cached``, ``given`` ..."""
    cached_rows: int
    """Rows that a cache supplied and that no captured call computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributeDifference:
    """One attribute that is not the same on both sides."""

    module: str
    """Empty for the model's configuration."""
    name: str
    rollout: object
    train: object

    def __str__(self) -> str:
        """As evidence."""
        where = f"{self.module}." if self.module else "config."
        return f"{where}{self.name} is {_short(self.rollout)} in the rollout and {_short(self.train)} in training"


def side_facts(side: Side, names: NameMap) -> SideFacts:
    """Read one side's manifest and calls."""
    calls = [call for rank in side.ranks for call in side.calls(rank).values()]
    return SideFacts(
        modules={canonical(entry.name, names): entry for entry in side.manifest.modules},
        config=side.manifest.model_config,
        layouts=frozenset(call.layout.value for call in calls),
        cached_rows=sum(call.counts.cached for call in calls if call.layout is not RowLayout.UNKNOWN),
    )


def differing(facts: tuple[SideFacts, SideFacts], module: str) -> list[AttributeDifference]:
    """Attributes of a module, of what lies in it, and of the configuration that differ, the module's own first."""
    found: list[AttributeDifference] = []
    first, second = facts
    for name in _near(module, first.modules):
        mine, other = first.modules.get(name), second.modules.get(name)
        if mine is None or other is None:
            continue
        found += list(_unlike(name, mine.attributes, other.attributes))
        if mine.training != other.training:
            found.append(
                AttributeDifference(module=name, name="training", rollout=mine.training, train=other.training)
            )
    found += list(_unlike("", _flat(first.config), _flat(second.config)))
    return found


def _near(module: str, modules: Mapping[str, ModuleEntry]) -> list[str]:
    inside = [name for name in modules if name != module and name.startswith(f"{module}.")] if module else []
    return [module, *inside]


def _unlike(
    module: str, first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[AttributeDifference]:
    for name in first:
        if name in second and first[name] != second[name]:
            yield AttributeDifference(module=module, name=name, rollout=first[name], train=second[name])


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    """Nested values under their own names too: ``rope_parameters.factor``."""
    found: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, object]", value)
            found |= {f"{key}.{name}": item for name, item in inner.items()}
        else:
            found[key] = value
    return found


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def belongs_to_attention(module: str, facts: SideFacts) -> bool:
    """True for a module with a query projection inside, or one that lies beside it."""
    names = facts.modules
    return any(
        f"{owner}.q_proj" in names or f"{owner}.c_attn" in names for owner in (module, parent_of(module))
    )
