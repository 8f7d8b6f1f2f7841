"""Why token ids differ: from edit scripts, lags and texts to a cause.

Takes token findings; gives one cause per kind, with the first places as evidence. Without a tokenizer a
re-tokenised response is recognised by its shape only, and is then not confirmed.
"""

from collections.abc import Callable, Sequence

from trainfer.check.compare.records import TokenFinding
from trainfer.check.explain.fixes import make_cause
from trainfer.check.explain.records import Cause

Decode = Callable[[Sequence[int]], str]

_MAX_EVIDENCE = 4


def token_causes(findings: Sequence[TokenFinding], decode: Decode | None) -> list[Cause]:
    """One cause per kind of difference, the most frequent first."""
    groups: dict[tuple[str, bool], list[TokenFinding]] = {}
    for finding in findings:
        groups.setdefault(_classify(finding, decode), []).append(finding)
    causes: list[Cause] = []
    for (cause, confirmed), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        evidence = [_evidence(finding) for finding in members[:_MAX_EVIDENCE]]
        if len(members) > _MAX_EVIDENCE:
            evidence.append(f"and {len(members) - _MAX_EVIDENCE} more sequences")
        if cause == "tokens.retokenized":
            evidence.append(
                "the texts are equal" if confirmed else "the texts were not compared: no tokenizer"
            )
        causes.append(make_cause(cause, stage="tokens", module=None, confirmed=confirmed, evidence=evidence))
    return causes


def _classify(finding: TokenFinding, decode: Decode | None) -> tuple[str, bool]:
    """(cause, proven)."""
    if finding.kind.endswith("_logprobs"):
        if "last token" in finding.note:
            return "tokens.packing_roll", True
        return (
            ("tokens.wrong_sample", True) if finding.other_sequence is not None else ("tokens.shifted", True)
        )
    if finding.other_sequence is not None:
        return "tokens.wrong_sample", True
    first, second = finding.first, finding.second
    assert first is not None
    assert second is not None
    if len(first.tokens) == len(second.tokens) and finding.lag:
        return "tokens.shifted", True
    if decode is not None and decode(first.tokens) == decode(second.tokens):
        return "tokens.retokenized", True
    return _by_shape(finding, len(first.tokens), len(second.tokens), first.prompt_length)


def _by_shape(finding: TokenFinding, length: int, other: int, prompt: int) -> tuple[str, bool]:
    edits = finding.edits
    kinds = {edit.kind for edit in edits}
    if len(edits) == 1:
        edit = edits[0]
        at_end = edit.first_stop == length and edit.second_stop == other
        at_start = edit.first_start == 0 and edit.second_start == 0
        short_side = kinds == {"delete"} or kinds == {"insert"}
        if short_side and at_end:
            return "tokens.truncated", True
        if kinds == {"delete"} and at_start and edit.first_stop - edit.first_start > 1:
            return "tokens.truncated", True
    if kinds == {"insert"}:
        return "tokens.inserted", True
    if kinds == {"delete"}:
        span = max(edit.first_stop - edit.first_start for edit in edits)
        return ("tokens.template", True) if span > 1 else ("tokens.inserted", True)
    in_prompt = all(edit.first_stop <= prompt for edit in edits)
    return ("tokens.template", False) if in_prompt else ("tokens.retokenized", False)


def _evidence(finding: TokenFinding) -> str:
    if finding.note and not finding.edits:
        return f"sequence {finding.sequence}: {finding.note}"
    names = ("the rollout", "training") if finding.kind == "sides" else ("the record", "what was run")
    edit, first, second = finding.edits[0], finding.first, finding.second
    assert first is not None
    assert second is not None
    mine = list(first.tokens[edit.first_start : edit.first_stop][:8])
    other = list(second.tokens[edit.second_start : edit.second_stop][:8])
    text = f"sequence {finding.sequence}: first difference at index {edit.first_start}: "
    if edit.kind == "insert":
        here = first.tokens[edit.first_start] if edit.first_start < len(first.tokens) else "the end"
        text += f"{names[1]} has {other} before {here}, {names[0]} has not"
    elif edit.kind == "delete":
        text += (
            f"{names[0]} has {mine} (indices {edit.first_start} to {edit.first_stop - 1}), {names[1]} has not"
        )
    else:
        text += f"{names[0]} has {mine}, {names[1]} has {other}"
    if finding.lag:
        text += f"; lag {finding.lag:+d}"
    if finding.other_sequence is not None:
        text += f"; these are the tokens of sequence {finding.other_sequence}"
    return f"{text}; {finding.note}" if finding.note else text
