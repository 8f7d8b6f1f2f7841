"""What the planner is asked: configuration entries in the order in which they were given, with their sources.

Neutral between YAML, launch scripts and overrides on the command line; knows no rule set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainfer.config.override_records import Override, OverrideKind


@dataclass(frozen=True, kw_only=True, slots=True)
class NotStatic:
    """A value that cannot be known without running something."""

    why: str
    """What stands there, with its line, e.g. ``$(nproc) in run.sh:12``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One value that somebody set."""

    key: str
    value: object
    """A plain value, or :class:`NotStatic`."""
    source: str
    kind: OverrideKind = OverrideKind.CHANGE
    from_command: bool = True
    """False for a line of a YAML file, to which Hydra's rules for ``+`` do not apply."""

    @staticmethod
    def of(override: Override, *, source: str) -> "Entry":
        """An entry for a parsed override."""
        return Entry(key=override.key, value=override.value, source=source, kind=override.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model, as its ``config.json`` gives them; None where it does not."""

    layers: int | None = None
    width: int | None = None
    inner_width: int | None = None
    """Width inside the feed-forward layer."""
    heads: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None
    vocabulary: int | None = None
    tied_embeddings: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One input, read."""

    entries: Sequence[Entry] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that reach the training processes."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of the reader's own environment, for ``${oc.env:…}``."""
    notes: Sequence[str] = ()
    """What the reader wants said, such as constructs that are not known statically."""
    megatron: bool = False
    """True when the command chooses Megatron's configuration."""
    other_trainer: str | None = None
    """A training module other than the stock one; it may have keys of its own."""
    model: ModelShape | None = None
    """None where the model's ``config.json`` is not at hand."""
