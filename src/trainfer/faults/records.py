"""What a fault is, what is expected of a comparison, and what came of it: records.

Takes nothing; gives plain data. A *fault* is one way in which one cause happens in the field; a *case* is a fault planted with
one seed: side, model, dtype, layer and magnitude are drawn from the seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Token = tuple[int, int]
"""(index into the rollout's sequences, 0-based position in prompt + response)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences as the rollout made them.

    Example: ``Batch(tokens=((5, 6, 7),), prompt_lengths=(2,))`` has one response token, 7.
    """

    tokens: tuple[tuple[int, ...], ...]
    """Prompt + response, no padding."""
    prompt_lengths: tuple[int, ...]

    def rows(self, *, start: int = 0) -> set[Token]:
        """Rows that both sides run, from a position on: the last sampled token has none on the rollout side."""
        return {(s, p) for s, tokens in enumerate(self.tokens) for p in range(start, len(tokens) - 1)}

    def rows_of(self, sequences: Sequence[int], *, start: int = 0) -> set[Token]:
        """As ``rows``, of some sequences only."""
        return {token for token in self.rows(start=start) if token[0] in set(sequences)}

    def responses(self) -> set[Token]:
        """Scored tokens."""
        return {
            (s, p)
            for s, (tokens, length) in enumerate(zip(self.tokens, self.prompt_lengths, strict=True))
            for p in range(length, len(tokens))
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The right answer to one planted cause."""

    cause: str
    accepted: tuple[str, ...] = ()
    """Other ids that are right too; ``docs/faults.md`` says which and why."""
    modules: tuple[str, ...] = ()
    """Right modules, usually one; none for causes without a module."""
    tokens: Callable[[Batch], set[Token]] | None = None
    """The rows or tokens that the fault touches, where that is a defined set."""
    first_step: int | None = None
    """First step that is bad, where several are captured."""

    @property
    def families(self) -> frozenset[str]:
        """Families of the right ids."""
        return frozenset(family(cause) for cause in (self.cause, *self.accepted))


def family(cause: str) -> str:
    """The part of a cause id before the dot."""
    return cause.partition(".")[0]


PRECISION = (
    "norm.precision",
    "head.dtype",
    "kv_cache.quantized",
    "attention.backend",
    "rope.dtype",
    "logprob.path",
)
"""Causes whose size is a dtype's: beside a model of that dtype they drown in its noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fault with one seed."""

    fault: str
    cause: str
    seed: int
    architecture: str
    dtype: str
    side: str
    """``rollout`` or ``train``: where the fault is planted."""
    layer: int
    magnitude: float | None

    @property
    def has_size(self) -> bool:
        """Larger or smaller by a number, or by the dtype in which something is computed."""
        return self.magnitude is not None or self.cause in PRECISION

    @property
    def title(self) -> str:
        """One line for people."""
        size = "" if self.magnitude is None else f" {self.magnitude:g}"
        return f"{self.fault}{size}, seed {self.seed}: {self.architecture} {self.dtype}, {self.side}, layer {self.layer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a comparison said, as plain data."""

    verdict: str
    stage: str | None
    module: str | None
    """Of the first divergence."""
    tokens: frozenset[Token]
    causes: tuple[str, ...]
    ranked: tuple[str, ...]
    """Modules in the order in which the answer names them: first divergence, causes, then the worst introducers."""
    shares: tuple[float | None, ...]
    """Of |Δ log p| that each cause explains."""
    confirmed: tuple[bool, ...]
    first_step: int | None
    abs_diff_mean: float | None
    """Mean |Δ log p| between the sides, nats."""
    text: str = field(repr=False)
    """The terminal's summary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One case, scored; None where a score is not defined for it."""

    case: Case
    expected: tuple[str, ...]
    """Right cause ids, first cause first."""
    expected_module: str | None
    answer: Answer | None
    """None where the comparison raised."""
    counted: bool
    """The fault is larger than the noise, so that it must be found."""
    ratio: float | None
    """Mean |Δ log p| over that of the same pair without the fault."""
    top1: bool | None = None
    top3: bool | None = None
    family: bool = False
    exact: bool = False
    """The very id, or one that is accepted for it."""
    tokens: float | None = None
    """Intersection over union."""
    first_step: bool | None = None
    share: float | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlOutcome:
    """One control with one seed."""

    name: str
    seed: int
    alarm: str
    """Empty where there is none."""
    answer: Answer | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """All of a run."""

    outcomes: tuple[Outcome, ...]
    controls: tuple[ControlOutcome, ...]
    seeds: int
    seconds: float
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Cause id -> why it cannot be made on a CPU."""
    generator: str = "first"
    """Whose faults and controls."""
