"""What to do next, as commands or one sentence each.

Takes a verdict and its causes; gives the first thing to do first.
"""

from collections.abc import Sequence

from trainfer.check.compare.records import Comparison, Status, Verdict
from trainfer.check.explain.records import Cause

_CONFIRM = (
    "trainfer compare ROLLOUT TRAIN --model PATH replays every module of the model and confirms the cause"
)


def next_steps(
    verdict: Verdict, causes: Sequence[Cause], comparison: Comparison, *, replayed: bool
) -> tuple[str, ...]:
    """At most three steps."""
    steps: list[str] = []
    modules = comparison.stage("modules").status
    if verdict is Verdict.INCOMPARABLE:
        steps.append("trainfer inspect DUMP shows what each side holds; capture again what is missing")
    if any(cause.confirmed and cause.repair == "configuration" for cause in causes):
        first = next(cause for cause in causes if cause.confirmed and cause.repair == "configuration")
        steps.append(
            f"mend {first.cause} (the fix above), capture again, and compare: what is behind it shows then"
        )
    unproven = [cause for cause in causes if not cause.confirmed and cause.stage == "modules"]
    if unproven and not replayed:
        steps.append(_CONFIRM)
    elif unproven:
        where = unproven[0].module or "the model itself"
        steps.append(
            f'trainfer.capture(..., level="mix", modules=["{where}"]) on both sides shows the functions inside it'
        )
    if modules is Status.NOT_CHECKED and verdict is Verdict.DIVERGED and not unproven:
        steps.append("synchronise the weights, capture one step again, and compare: modules are judged then")
    if verdict is Verdict.DIVERGED and any(cause.cause.startswith("logprob.") for cause in causes):
        steps.append("trainfer plan RUN.sh shows which temperature, filters and log-prob mode the run uses")
    if verdict is Verdict.ROUNDING and comparison.stage("logprobs").status is Status.ROUNDING:
        steps.append("trainfer.exact=true (or VLLM_BATCH_INVARIANT=1) removes what is left, where it matters")
    return tuple(steps[:3])
