"""What a comparison means, as records; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

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
