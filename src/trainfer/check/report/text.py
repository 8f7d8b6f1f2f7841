"""The comparison on a terminal: verdict, first divergence, coverage, causes, worst modules and tokens.

Takes an explanation; gives lines of plain text. Control characters in names and tokens are shown escaped.
"""

import numpy as np

from trainfer.check.compare.records import Comparison, Status
from trainfer.check.explain.records import Explanation, FirstDivergence

_WORST = 5
_MARKS = {
    Status.EQUAL: "=",
    Status.ROUNDING: "~",
    Status.DIVERGED: "!",
    Status.NOT_CHECKED: "-",
}


def summary(explanation: Explanation) -> str:
    """All lines, the verdict first."""
    comparison = explanation.comparison
    lines = [f"{explanation.verdict.value.upper()}: {explanation.why}"]
    plain = in_plain_words(explanation)
    if plain:
        lines.append(plain)
    if explanation.first_divergence is not None:
        lines.append(f"first divergence: {describe_first(explanation.first_divergence)}")
    lines.append("")
    lines += [
        f"  {_MARKS[stage.status]} {stage.name:<12}{stage.status.value:<12} {stage.summary}"
        for stage in comparison.stages
    ]
    lines += [
        "",
        *_coverage(comparison),
        *_causes(explanation),
        *_repairs(explanation),
        *_next(explanation),
        *_worst_modules(comparison),
        *_worst_tokens(explanation),
    ]
    return "\n".join(visible(line) for line in lines)


def visible(line: str) -> str:
    """Control characters escaped, so that a name cannot move the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def describe_first(first: FirstDivergence) -> str:
    """Stage, module, pass and tokens in one line."""
    parts = [f"stage {first.stage}"]
    if first.module is not None:
        parts.append(first.module or "the model itself")
    if first.pass_name is not None:
        parts.append(f"pass {first.pass_name}")
    if first.tokens:
        parts.append(f"tokens {token_ranges(first.tokens)}")
    return ", ".join(parts)


def token_ranges(tokens: tuple[tuple[int, int], ...], limit: int = 4) -> str:
    """``0:17-19, 1:4``: sequence, positions. Example: [(0, 17), (0, 18), (1, 4)] is ``0:17-18, 1:4``."""
    runs: list[list[int]] = []
    for sequence, position in tokens:
        if runs and runs[-1][0] == sequence and runs[-1][2] == position - 1:
            runs[-1][2] = position
        else:
            runs.append([sequence, position, position])
    texts = [f"{s}:{a}" if a == b else f"{s}:{a}-{b}" for s, a, b in runs[:limit]]
    more = f" and {len(runs) - limit} more runs" if len(runs) > limit else ""
    return ", ".join(texts) + more


def _coverage(comparison: Comparison) -> list[str]:
    coverage = comparison.coverage
    lines = [
        f"coverage: {coverage.rows_matched} of {coverage.rows_rollout} rollout rows matched "
        f"({coverage.rows_train} in training), {coverage.modules_matched} modules "
        f"({', '.join(f'{count} by {how}' for how, count in coverage.how_matched.items()) or 'none'})"
    ]
    if coverage.not_rows:
        left_out = ", ".join(f"{count} {name}" for name, count in coverage.not_rows.items())
        lines.append(f"  slots left out: {left_out}")
    unmatched = coverage.modules_unmatched
    if unmatched:
        more = f" and {len(unmatched) - _WORST} more" if len(unmatched) > _WORST else ""
        lines.append(f"  not matched: {'; '.join(unmatched[:_WORST])}{more}")
    lines += [f"  incomplete: {text}" for text in coverage.incomplete]
    lines += [f"  note: {text}" for text in coverage.notes]
    return lines


def in_plain_words(explanation: Explanation) -> str:
    """What is wrong and what to do about it, in one or two sentences; empty where nothing is."""
    if not explanation.causes:
        return ""
    proven = [cause for cause in explanation.causes if cause.confirmed]
    main = (proven or list(explanation.causes))[0]
    where = f" in {main.module}" if main.module else ""
    if main.cause == "module.unknown":
        return f"{main.module or 'The model itself'} computes something else on the two sides; why is not known yet."
    share = main.share_explained
    explains = f", which explains {share:.0%} of the difference in log-probs" if share is not None else ""
    certain = "The cause is" if main.confirmed else "The likely cause (not confirmed) is"
    text = f"{certain} {main.cause}{where}{explains}."
    others = len(explanation.causes) - 1
    if others:
        text += f" {others} more {'cause follows' if others == 1 else 'causes follow'}."
    return text


def _causes(explanation: Explanation) -> list[str]:
    lines: list[str] = []
    for number, cause in enumerate(explanation.causes, start=1):
        where = f" in {cause.module}" if cause.module else ""
        share = (
            f", explains {cause.share_explained:.0%} of |Δ log p|"
            if cause.share_explained is not None
            else ""
        )
        proven = "confirmed" if cause.confirmed else "not confirmed"
        lines += ["", f"cause {number}: {cause.cause}{where} ({proven}{share})"]
        lines += [f"  {text}" for text in cause.evidence]
        if cause.excluded:
            lines.append(f"  excluded: {'; '.join(cause.excluded)}")
        lines.append(f"  fix: {cause.fix}")
        lines += [f"    {system}: {place}" for system, place in cause.places.items()]
    if explanation.remaining is not None and explanation.causes:
        lines += ["", f"left when all of it is undone: mean |Δ log p| {explanation.remaining:.3g} nats"]
    return lines


KINDS = {
    "configuration": "configuration: removes the cause",
    "execution": "execution: both sides compute alike",
    "objective": "objective: corrects for the difference, and hides it",
}
"""The kinds of repair, in words."""


def _repairs(explanation: Explanation) -> list[str]:
    lines: list[str] = []
    for kind, words in KINDS.items():
        named = [item for item in explanation.repairs if item.kind == kind]
        if not named:
            continue
        own = [item.cause for item in named if item.cause]
        lines.append(f"  {words}" + (f" ({', '.join(own)}, above)" if own else ""))
        lines += [f"    {item.what}" for item in named if not item.cause]
    return ["", "repairs, by kind", *lines] if lines else []


def _next(explanation: Explanation) -> list[str]:
    return ["", *[f"next: {step}" for step in explanation.next_steps]] if explanation.next_steps else []


def _worst_modules(comparison: Comparison) -> list[str]:
    off = [
        module
        for module in comparison.modules
        if module.metrics.max_abs > 0 or module.status is Status.DIVERGED
    ]
    if not off:
        return []
    off.sort(key=lambda module: (-module.introduced, -module.metrics.max_abs))
    lines = [
        "",
        f"{'worst modules':<44}{'status':<10}{'introduced':>11}{'inherited':>11}{'max abs':>11}{'cosine':>10}",
    ]
    lines += [
        f"  {module.module or '(model)':<42}{module.status.value:<10}{module.introduced:>11.3g}"
        f"{module.inherited:>11.3g}{module.metrics.max_abs:>11.3g}{module.metrics.cosine:>10.6f}"
        for module in off[:_WORST]
    ]
    return lines


def _worst_tokens(explanation: Explanation) -> list[str]:
    result = explanation.comparison.logprobs
    if result is None or not result.difference.any():
        return []
    off = np.nan_to_num(np.abs(result.difference), nan=np.inf)
    lines = ["", f"{'worst tokens':<30}{'rollout log p':>15}{'train log p':>15}{'difference':>13}"]
    for place in np.argsort(-off, kind="stable")[:_WORST].tolist():
        sequence, position = int(result.labels[place]), int(result.positions[place])
        token = explanation.comparison.rollout_sequences[sequence].tokens[position]
        text = explanation.texts.get(token, "")
        name = f"{sequence}:{position} {token} {text!r}" if text else f"{sequence}:{position} {token}"
        lines.append(
            f"  {name:<28}{result.rollout[place]:>15.5f}{result.train[place]:>15.5f}{result.difference[place]:>13.3g}"
        )
    return lines
