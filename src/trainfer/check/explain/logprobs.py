"""Why log-probs differ though the logits agree: temperature, filters, scaling after the softmax.

Takes the log-prob result with the reading of each side's own logits; gives causes. Where logits were captured, a
cause is confirmed by reading both sides alike and counting what remains.
"""

from collections.abc import Mapping

import numpy as np

from trainfer.check.compare.records import Comparison, LogprobFit, LogprobResult, Status
from trainfer.check.explain.fixes import make_cause
from trainfer.check.explain.records import Cause

_FILTERS = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
_SIDES = ("rollout", "train")


def logprob_causes(comparison: Comparison) -> list[Cause]:
    """Causes of the log-prob stage."""
    result = comparison.logprobs
    if result is None or comparison.stage("logprobs").status is not Status.DIVERGED:
        return []
    found = _from_readings(result) or _from_declarations(result) or _from_ratio(result)
    return found or _from_path(result)


def _share(result: LogprobResult, remaining: float | None) -> float | None:
    before = float(np.mean(np.abs(result.difference)))
    if remaining is None or before <= 0 or not np.isfinite(before):
        return None
    return max(0.0, min(1.0, 1 - remaining / before))


def _effective(fit: LogprobFit) -> tuple[str, float]:
    """What was really done: raw and declared readings at one temperature are the same thing."""
    if fit.reading == "raw":
        return ("scaled", 1.0)
    return ("divided_after" if fit.reading == "divided_after" else "scaled", fit.temperature)


def _from_readings(result: LogprobResult) -> list[Cause]:
    fits = result.fits
    if fits[0] is None or fits[1] is None or "unknown" in (fits[0].reading, fits[1].reading):
        return []
    share = _share(result, result.rescored)
    evidence = [
        f"{side}: recorded log-probs are its logits read as {_words(fit)} (largest difference {fit.worst:.2g} nats"
        f" over {fit.tokens} tokens; as declared {fit.declared_worst:.2g})"
        for side, fit in zip(_SIDES, fits, strict=True)
        if fit is not None
    ]
    if share is not None:
        evidence.append(f"read alike, mean |Δ| is {result.rescored:.2g} nats")
    causes: list[Cause] = []
    if fits[0].width != fits[1].width:
        causes.append(_cause("head.padded_vocab", share, evidence, module="lm_head"))
    if "divided_after" in (fits[0].reading, fits[1].reading):
        causes.append(_cause("logprob.scaled_after_softmax", share, evidence))
    elif _effective(fits[0]) != _effective(fits[1]):
        causes.append(_cause("logprob.temperature", share, evidence))
    applied = [
        _filters(said) if fit.reading == "declared" else {}
        for fit, said in zip((fits[0], fits[1]), result.declared, strict=True)
    ]
    if applied[0] != applied[1]:
        causes.append(
            _cause(
                "logprob.filtered", share, [*evidence, f"filters: rollout {applied[0]}, train {applied[1]}"]
            )
        )
    return causes


def _from_path(result: LogprobResult) -> list[Cause]:
    """Log-probs that follow from no reading of the side's own logits: they were computed in another way, or elsewhere."""
    odd = [
        (side, fit)
        for side, fit in zip(_SIDES, result.fits, strict=True)
        if fit is not None and fit.reading == "unknown"
    ]
    if not odd or result.rescored is None:
        return []
    share = _share(result, result.rescored)
    evidence = [
        f"{side}: recorded log-probs are off its own logits' by up to {fit.declared_worst:.3g} nats over {fit.tokens} "
        "tokens, whatever temperature or filter is assumed"
        for side, fit in odd
    ]
    evidence.append(f"both derived from the captured logits, mean |Δ| is {result.rescored:.2g} nats")
    return [_cause("logprob.path", share, evidence)]


def _words(fit: LogprobFit) -> str:
    match fit.reading:
        case "raw":
            return "raw (temperature 1, no filter)"
        case "divided_after":
            return f"log-softmax divided by {fit.temperature:g} afterwards"
        case "cut":
            return f"the first {fit.width} columns alone (the rest masked), temperature {fit.temperature:g}"
        case "scaled":
            return f"logits divided by {fit.temperature:g}, no filter"
        case _:
            return f"declared (temperature {fit.temperature:g})"


def _filters(said: Mapping[str, float | int]) -> dict[str, float | int]:
    return {name: said[name] for name, none in _FILTERS.items() if name in said and said[name] != none}


def _from_declarations(result: LogprobResult) -> list[Cause]:
    """No logits: what the two sides say of themselves."""
    first, second = result.declared
    causes: list[Cause] = []
    temperatures = float(first.get("temperature", 1.0)), float(second.get("temperature", 1.0))
    if temperatures[0] != temperatures[1]:
        text = f"the rollout declares temperature {temperatures[0]:g}, training {temperatures[1]:g}"
        causes.append(_cause("logprob.temperature", None, [text]))
    filters = _filters(first), _filters(second)
    if filters[0] != filters[1]:
        text = f"the rollout declares filters {filters[0]}, training {filters[1]}"
        causes.append(_cause("logprob.filtered", None, [text]))
    return causes


def _from_ratio(result: LogprobResult) -> list[Cause]:
    """No logits and nothing declared: one constant ratio of all log-probs is a division after the softmax."""
    usable = (np.abs(result.rollout) > 1e-3) & np.isfinite(result.rollout) & np.isfinite(result.train)
    if np.count_nonzero(usable) < 4:
        return []
    ratios = result.train[usable] / result.rollout[usable]
    ratio = float(np.median(ratios))
    if abs(ratio - 1) < 1e-3 or float(np.max(np.abs(ratios - ratio))) > 1e-3 * abs(ratio):
        return []
    left = float(np.mean(np.abs(result.train[usable] / ratio - result.rollout[usable])))
    text = f"train log-prob / rollout log-prob is {ratio:.5g} for all {len(ratios)} tokens"
    return [_cause("logprob.scaled_after_softmax", _share(result, left), [text])]


def _cause(cause: str, share: float | None, evidence: list[str], *, module: str | None = None) -> Cause:
    return make_cause(
        cause,
        stage="logprobs",
        module=module,
        share=share,
        confirmed=share is not None and share > 0.9,
        evidence=evidence,
    )
