"""From trials to causes: what was assumed, what came of it, what was excluded.

Takes a replay with its trials; gives causes in the order in which they were found, each with numbers that a person can
check against the dumps.
"""

from collections.abc import Sequence

from trainfer.check.explain.fixes import fixes, make_cause
from trainfer.check.explain.records import Cause
from trainfer.check.replay.records import ModuleReplay, Replay, Trial

_MAX_EXCLUDED = 6


def causes_of_trials(replay: Replay) -> list[Cause]:
    """One cause for each trial that reproduced, and for each module that nothing reproduced."""
    return [_cause(trial) for trial in replay.trials]


def _cause(trial: Trial) -> Cause:
    known = trial.cause if trial.cause in fixes() else "module.unknown"
    side = "rollout" if trial.side == "rollout" else "train"
    error = f"{trial.error_before:.3g}, {trial.error_before / max(trial.floor, 1e-30):.3g} times what rounding may"
    lines = [
        f"the {side} side introduces an error of up to {error}, in {len(trial.tokens)} rows of {_runs(trial)}"
    ]
    lines += list(trial.evidence)
    if trial.reproduced:
        left = (
            "nothing"
            if trial.error_after == 0
            else f"{trial.error_after:.3g} (rounding may: {trial.floor:.3g})"
        )
        lines.append(
            f"done in the replay, the side's captured values come out: {left} is left of {trial.error_before:.3g}"
        )
    elif known == "module.unknown":
        lines.append("no assumption about this module reproduces the captured values")
    if len(trial.modules) > 1:
        lines.append(f"the same holds in {len(trial.modules)} modules: {_listed(trial.modules)}")
    return make_cause(
        known,
        stage="modules",
        module=trial.module,
        confirmed=trial.reproduced,
        evidence=lines,
        share=trial.share_explained,
        modules=trial.modules,
        excluded=[
            f"{cause}: leaves {left:.0%} of the error" for cause, left in trial.rejected[:_MAX_EXCLUDED]
        ],
    )


def _runs(trial: Trial) -> str:
    count = len({sequence for sequence, _ in trial.tokens})
    return f"{count} sequence{'' if count == 1 else 's'}"


def _listed(names: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def loudest(replay: Replay) -> tuple[ModuleReplay, float] | None:
    """The module that comes closest to its floor, or furthest above it, and its factor."""
    pairs = [(item, max(item.factors)) for item in replay.modules]
    return max(pairs, key=lambda pair: pair[1], default=None)
