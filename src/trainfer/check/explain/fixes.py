"""What to do about a cause: data (``fixes.json``).

A repair is of one of three kinds, which are kept apart: ``configuration`` removes the cause, ``execution`` makes both
sides compute alike, ``objective`` corrects for what is left in the loss, and so hides it.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from trainfer.check.explain.records import Cause, Repair

CONFIGURATION, EXECUTION, OBJECTIVE = "configuration", "execution", "objective"


class Fix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``fixes.json``."""

    fix: str
    repair: str
    places: dict[str, str]
    """System -> configuration key or place in its code."""


@cache
def fixes() -> Mapping[str, Fix]:
    """All of them, by cause id."""
    data = files("trainfer.check.explain").joinpath("fixes.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, Fix])


def fix_for(cause: str) -> str:
    """One sentence for one cause id."""
    return fixes()[cause].fix


def make_cause(
    cause: str,
    *,
    stage: str,
    module: str | None,
    confirmed: bool,
    evidence: Sequence[str],
    share: float | None = None,
    modules: Sequence[str] = (),
    excluded: Sequence[str] = (),
) -> Cause:
    """A cause with its fix, its kind of repair and the places where it is made."""
    known = fixes()[cause]
    return Cause(
        cause=cause,
        stage=stage,
        module=module,
        share_explained=share,
        confirmed=confirmed,
        evidence=tuple(evidence),
        fix=known.fix,
        repair=known.repair,
        modules=tuple(modules),
        excluded=tuple(excluded),
        places=known.places,
    )


_EXACT = Repair(
    kind=EXECUTION,
    cause="",
    what="Compute alike on both sides: one kernel for both, in a fixed order of sums. Removes rounding, at a cost in speed.",
    places={"trainfer": "trainfer.exact=true (default where calibration passes)", "vLLM": "VLLM_BATCH_INVARIANT=1"},
)  # fmt: skip
_CORRECT = Repair(
    kind=OBJECTIVE,
    cause="",
    what="Weight or reject tokens by the ratio of the two policies (truncated importance sampling). Hides what is left; "
    "removes nothing, so mend the causes first.",
    places={
        "verl": "algorithm.rollout_correction.rollout_is=token, rollout_is_threshold=2.0",
        "trainfer": "algorithm.rollout_correction",
    },
)


def repairs_for(causes: Sequence[Cause], *, differs: bool) -> tuple[Repair, ...]:
    """What can be done, kind by kind.

    Args:
        causes: What was found.
        differs: Whether log-probs differ at all: without it nothing is to be corrected.
    """
    found = [
        Repair(kind=cause.repair, cause=cause.cause, what=cause.fix, places=cause.places)
        for cause in causes
        if cause.cause != "module.unknown"
    ]
    if any(repair.kind == EXECUTION for repair in found) and all(
        repair.what != _EXACT.what for repair in found
    ):
        found.append(_EXACT)
    if differs:
        found.append(_CORRECT)
    kinds = (CONFIGURATION, EXECUTION, OBJECTIVE)
    return tuple(sorted(found, key=lambda repair: kinds.index(repair.kind)))
