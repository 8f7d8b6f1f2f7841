"""Why weights differ: stale, missing, tied on one side, a buffer, another policy.

Takes weight findings and the versions; gives causes that follow from them directly.
"""

from collections.abc import Sequence

from trainfer.check.compare.records import Comparison, Stage, WeightFinding
from trainfer.check.explain.first import first_weight
from trainfer.check.explain.fixes import make_cause
from trainfer.check.explain.records import Cause

_FUSED_PARTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_HEADS = ("lm_head", "output_layer", "embed_out")
_MAX_NAMED = 5


def weight_causes(comparison: Comparison) -> list[Cause]:
    """Causes of the weights stage; the first one concerns the module that runs first."""
    if comparison.stale_versions is not None:
        return [_staleness(comparison.stage("weights"))]
    groups: dict[str, list[WeightFinding]] = {}
    changed = [finding for finding in comparison.weights if finding.kind == "differs"]
    for finding in comparison.weights:
        groups.setdefault(_cause_of(finding, changed), []).append(finding)
    first = first_weight(comparison)
    ordered = sorted(groups.items(), key=lambda item: first not in item[1])
    return [_cause(cause, members, comparison) for cause, members in ordered]


def _cause_of(finding: WeightFinding, changed: Sequence[WeightFinding]) -> str:
    if finding.kind == "tie":
        return "weights.tied_head"
    if finding.kind == "padded":
        return "head.padded_vocab"
    if finding.kind.startswith("adapter") and finding.module.rpartition(".")[2] in _HEADS:
        return "head.adapter"
    if finding.kind == "adapter_rounded":
        return "weights.rounded_merge"
    if finding.kind.startswith("adapter"):
        return f"weights.{finding.kind}"
    if finding.kind.startswith("missing"):
        return "weights.missing"
    if finding.role == "buffer":
        return "weights.buffer"
    if finding.same_as:
        fused = all(item.module.rpartition(".")[2] in _FUSED_PARTS for item in changed if item.same_as)
        return "weights.fused_copy" if fused and not finding.same_as.startswith("fused") else "weights.stale"
    return "weights.changed"


def _cause(cause: str, members: Sequence[WeightFinding], comparison: Comparison) -> Cause:
    order = comparison.weights_order
    members = sorted(members, key=lambda finding: order.get(finding.module, len(order)))
    evidence = [_evidence(finding) for finding in members[:_MAX_NAMED]]
    if len(members) > _MAX_NAMED:
        evidence.append(f"and {len(members) - _MAX_NAMED} more")
    modules = dict.fromkeys(finding.module for finding in members)
    return make_cause(
        cause,
        stage="weights",
        module=members[0].module,
        confirmed=True,
        evidence=evidence,
        modules=tuple(modules),
    )


def _evidence(finding: WeightFinding) -> str:
    versions = f"rollout version {finding.rollout_version}, train version {finding.train_version}"
    match finding.kind:
        case "missing_in_rollout":
            return f"{finding.name} is in training only ({versions})"
        case "missing_in_train":
            return f"{finding.name} is in the rollout only ({versions})"
        case "tie":
            return f"{finding.name} is tied to another parameter on one side only, and its values differ ({versions})"
        case "adapter_missing":
            return f"{finding.name} holds the base without the other side's adapter ({versions})"
        case "padded":
            return f"{finding.name} has {finding.same_as} ({versions})"
        case "adapter_scale" | "adapter_rounded":
            return f"{finding.name}: {finding.same_as} ({versions})"
        case _:
            known = f"; it equals that of {finding.same_as}" if finding.same_as else ""
            return f"the fingerprint of {finding.name} differs ({versions}){known}"


def _staleness(stage: Stage) -> Cause:
    return make_cause(
        "policy.staleness",
        stage="weights",
        module=None,
        confirmed=stage.status.value == "diverged",
        evidence=(stage.summary, "rows of different policies are not compared: this is no mismatch"),
    )
