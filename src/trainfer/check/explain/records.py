"""What a comparison means, as records; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainfer.check.compare.records import Comparison, Verdict

Token = tuple[int, int]
"""(index into the rollout's sequences, 0-based position in prompt + response)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDivergence:
    """Where the two sides part ways first, in the order of the stages and of execution."""

    stage: str
    module: str | None
    tokens: tuple[Token, ...]
    pass_name: str | None
    """The rollout's pass: ``prefill`` or ``decode``; None where no row is concerned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why, as far as it is known. Ids are those of the design: ``weights.stale``, ``logprob.temperature`` and so on."""

    cause: str
    stage: str
    module: str | None
    share_explained: float | None
    """Of the mean |Δ log p|: what disappears when the cause is undone; None where it was not undone."""
    confirmed: bool
    evidence: tuple[str, ...]
    fix: str
    repair: str = "configuration"
    """Of which kind the fix is: see ``Repair``."""
    modules: tuple[str, ...] = ()
    """All modules in which it was found, in the order of execution."""
    excluded: tuple[str, ...] = ()
    """Causes that were considered for the same error, and why they fell."""
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    """System (verl, vLLM, Transformers, trainfer) -> the key or the place in its code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """One thing that can be done about what was found."""

    kind: str
    """``configuration`` removes the cause; ``execution`` makes both sides compute alike (shared or batch-invariant
    kernels); ``objective`` corrects for the difference in the loss, and hides it."""
    cause: str
    """The cause that it is for; empty: for all that is left."""
    what: str
    places: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The answer: verdict, place, causes, and the findings that they rest on."""

    verdict: Verdict
    why: str
    """One sentence."""
    first_divergence: FirstDivergence | None
    causes: tuple[Cause, ...]
    comparison: Comparison
    texts: Mapping[int, str]
    """Token id -> its text, where a tokenizer was at hand."""
    repairs: tuple[Repair, ...] = ()
    next_steps: tuple[str, ...] = ()
    """What to run or to do next, the first thing first."""
    remaining: float | None = None
    """Mean |Δ log p| that no confirmed cause explains; None without a replay."""
