"""Reads a comparison's result as the suite scores it, and scores it.

Takes a ``Diagnosis`` or what was expected; gives an ``Answer`` or an ``Outcome``. Uses what a person sees (first divergence,
causes, modules, evidence), nothing from inside the rules.
"""

from collections.abc import Sequence

from trainfer.check.diagnose import Diagnosis
from trainfer.faults.records import Answer, Batch, Case, Expected, Outcome, Token, family

COUNTED_RATIO = 3.0
"""A fault with a size must be found where it moves log-probs by this many times what the clean pair's noise does."""
_ROUNDING = ("equal", "rounding")


def read_answer(result: Diagnosis) -> Answer:
    """What the comparison said."""
    first = result.first_divergence
    steps = [
        finding.train_version for finding in result.comparison.weights if finding.train_version is not None
    ]
    logprobs = result.document().logprobs
    return Answer(
        verdict=result.verdict,
        stage=None if first is None else first.stage,
        module=None if first is None else first.module,
        tokens=frozenset() if first is None else frozenset(first.tokens),
        causes=tuple(cause.cause for cause in result.causes),
        ranked=_ranked(result),
        shares=tuple(cause.share_explained for cause in result.causes),
        confirmed=tuple(cause.confirmed for cause in result.causes),
        first_step=min(steps, default=None),
        abs_diff_mean=None if logprobs is None else logprobs.abs_diff_mean,
        text=result.summary(),
    )


def _ranked(result: Diagnosis) -> tuple[str, ...]:
    first = result.first_divergence
    names = [
        None if first is None else first.module,
        *(cause.module for cause in result.causes),
        *_introducers(result),
    ]
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _introducers(result: Diagnosis) -> list[str]:
    """The worst first: over the noise floor where modules were replayed, by size elsewhere."""
    if result.replay is not None:
        by_factor = sorted(result.replay.modules, key=lambda module: -max(module.factors))
        return [module.module for module in by_factor if max(module.factors) > 1]
    by_size = sorted(result.comparison.modules, key=lambda module: -module.introduced)
    return [module.module for module in by_size if module.introduced > 0]


def score_case(
    case: Case,
    expected: Sequence[Expected],
    answer: Answer,
    batch: Batch,
    *,
    gap: float,
    noise: float,
    seconds: float,
) -> Outcome:
    """Hold an answer against what was planted.

    Args:
        case: The case.
        expected: Planted causes, first cause first.
        answer: What the comparison said.
        batch: The rollout's sequences of the last step.
        gap: Mean |Δ log p| of the pair.
        noise: The same of the pair without the fault.
        seconds: Wall time.
    """
    ratio = gap / noise if noise > 0 and gap == gap else None
    counted = not case.has_size or _is_state(expected) or (ratio is not None and ratio >= COUNTED_RATIO)
    found = [cause for cause in answer.causes if family(cause) != "shape" or _wants_shape(expected)]
    first = expected[0]
    named = [item for item in expected if item.modules]
    top1 = top3 = None
    if first.modules:
        top1 = answer.ranked[:1] != () and answer.ranked[0] in first.modules
        top3 = any(module in first.modules for module in answer.ranked[:3])
    touched = first.tokens(batch) if first.tokens is not None else None
    return Outcome(
        case=case,
        expected=tuple(item.cause for item in expected),
        expected_module=named[0].modules[0] if named else None,
        answer=answer,
        counted=counted,
        ratio=ratio,
        top1=top1,
        top3=top3,
        family=_families_right(expected, found),
        exact=_ids_right(expected, found),
        tokens=None if touched is None else _overlap(touched, answer.tokens),
        first_step=None if first.first_step is None else answer.first_step == first.first_step,
        share=_share(answer),
        seconds=seconds,
    )


def _is_state(expected: Sequence[Expected]) -> bool:
    """Causes that are proven by fingerprints or versions, whatever their size in log-probs."""
    return all(family(item.cause) in ("policy",) or item.cause in _PROVEN for item in expected)


_PROVEN = ("weights.stale", "weights.fused_copy", "attention.window")


def _wants_shape(expected: Sequence[Expected]) -> bool:
    return any(family(item.cause) == "shape" for item in expected)


def _families_right(expected: Sequence[Expected], found: Sequence[str]) -> bool:
    """One cause: the first that is named is of its family. Several: each family is named."""
    families = [family(cause) for cause in found]
    if len(expected) == 1:
        return bool(families) and families[0] in expected[0].families
    return all(any(name in item.families for name in families) for item in expected)


def _ids_right(expected: Sequence[Expected], found: Sequence[str]) -> bool:
    if len(expected) == 1:
        return bool(found) and found[0] in (expected[0].cause, *expected[0].accepted)
    return all(any(name in (item.cause, *item.accepted) for name in found) for item in expected)


def _overlap(right: set[Token], said: frozenset[Token]) -> float:
    union = right | said
    return len(right & said) / len(union) if union else 1.0


def _share(answer: Answer) -> float | None:
    known = [share for share in answer.shares if share is not None]
    return min(1.0, sum(known)) if known else None


def alarm_of(answer: Answer, allowed: Sequence[str]) -> str:
    """Why a control's answer is a false alarm; empty where it is none."""
    wrong = [cause for cause in answer.causes if family(cause) != "shape" and cause not in allowed]
    if wrong:
        return f"cause {', '.join(wrong)}"
    if allowed:
        missing = [cause for cause in allowed if cause not in answer.causes]
        return f"{', '.join(missing)} not named" if missing else ""
    if answer.verdict not in _ROUNDING:
        return f"verdict {answer.verdict} at {answer.stage} {answer.module or ''}".rstrip()
    return ""
