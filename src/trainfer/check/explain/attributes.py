"""From a module that differs by itself, and what both sides say of it, to a cause. Without a replay; nothing is proven.

Takes a comparison, the first module that is off, and both sides' facts; gives a cause where the maths of the attribute
that differs, or the rows that are off, allow only one, and None otherwise.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainfer.check.compare.records import Comparison, PointResult, Status
from trainfer.check.explain.facts import AttributeDifference, SideFacts, belongs_to_attention, differing
from trainfer.check.explain.fixes import make_cause
from trainfer.check.explain.records import Cause

_EPS = ("eps", "variance_epsilon", "epsilon", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_WINDOW = ("sliding_window", "use_sliding_window", "layer_types")
_SOFTCAP = ("attn_logit_softcapping", "softcap", "logits_soft_cap")
_SCALE = ("scaling", "scale", "query_pre_attn_scalar")
_ROUTER = ("norm_topk_prob", "top_k", "num_experts_per_tok", "routed_scaling_factor", "norm_topk")
_ROPE = ("rope_type", "attention_scaling", "max_seq_len_cached", "original_max_seq_len", "rope_theta", "rope_scaling", "base")  # fmt: skip
_BACKEND = ("_attn_implementation", "attn_implementation", "attn_backend")
_NO_PRECISION = 0.02
"""Relative error of a projection that no dtype of training explains: bfloat16 has 2^-9 an operand."""
_DROPOUT = ("p", "attention_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")


def cause_from_facts(
    comparison: Comparison,
    result: PointResult,
    rows: NDArray[np.bool_],
    facts: tuple[SideFacts, SideFacts],
    evidence: Sequence[str],
) -> Cause | None:
    """The cause that both sides' own words, or the rows that are off, speak for."""
    module = result.point.module
    adapted = [any(name.startswith(f"{module}.lora_A") for name in side.modules) for side in facts]
    if any(adapted):
        alone = [name for name in comparison.coverage.modules_unmatched if f"{module}.lora_" in name]
        differences = differing(facts, module)
        found = _dropout(differences, facts) or _adapter(adapted, differences, result, alone)
    else:
        found = _from_attributes(module, result, facts) or _from_rows(comparison, result, rows, facts)
    if found is None:
        return None
    cause, lines = found
    return make_cause(
        cause,
        stage="modules",
        module=module,
        confirmed=False,
        evidence=(*lines, *evidence, "not confirmed: compare with model=PATH to replay it"),
    )


def _from_attributes(
    module: str, result: PointResult, facts: tuple[SideFacts, SideFacts]
) -> tuple[str, list[str]] | None:
    leaf = module.rpartition(".")[2]
    differences = differing(facts, module)
    entry = facts[0].modules.get(module)
    kind = entry.kind.lower() if entry is not None else leaf
    attention = belongs_to_attention(module, facts[0])
    if "norm" in kind or "norm" in leaf:
        return _named("norm.eps", differences, _EPS)
    if "rotary" in leaf:
        return _named("rope.scaling", differences, _ROPE) or _unlike_dtypes("rope.dtype", result)
    if leaf in ("lm_head", "output_layer"):
        return _unlike_dtypes("head.dtype", result)
    if leaf in ("gate", "router") or leaf.endswith("experts") or "moe" in kind:
        return _named("moe.routing", differences, _ROUTER)
    dropout = _dropout(differences, facts)
    if dropout is not None and (attention or "dropout" in kind):
        return dropout
    if attention:
        for cause, names in (
            ("attention.window", _WINDOW),
            ("attention.softcap", _SOFTCAP),
            ("attention.scale", _SCALE),
        ):
            found = _named(cause, differences, names)
            if found is not None:
                return found
    kinds = {side.modules[module].kind for side in facts if module in side.modules}
    if kinds == {"Linear"} and not differences and result.worst > _NO_PRECISION:
        text = (
            "its weight has the other side's fingerprint and its input agrees: it computes with another copy"
        )
        return "weights.cached_copy", [text]
    return None


def _adapter(
    adapted: Sequence[bool],
    differences: Sequence[AttributeDifference],
    result: PointResult,
    alone: Sequence[str],
) -> tuple[str, list[str]] | None:
    """A layer with an adapter on one side at least."""
    off = [item for item in differences if item.name in ("disable_adapters", "_disable_adapters")]
    if off:
        return "weights.adapter_missing", [str(off[0])]
    if all(adapted) and alone:
        return "weights.adapter_missing", [
            f"both sides have its adapter and one of them never ran it: {alone[0]}"
        ]
    scaled = _named("weights.adapter_scale", differences, ("scaling", "lora_alpha"))
    if all(adapted) or scaled is not None:
        return scaled
    where = "training" if adapted[1] else "the rollout"
    text = f"{where} has an adapter here and the other side one weight, which was not captured: it is off by"
    text += f" {result.worst:.2g}, relative"
    if result.worst <= _MERGE:
        return "weights.rounded_merge", [f"{text}, the size of a merge in half precision"]
    return "weights.adapter_scale", [f"{text}, more than a merge in half precision rounds"]


_MERGE = 0.03
"""Relative error of a projection whose merged weight was rounded to bfloat16 a few times."""


def _named(
    cause: str, differences: Sequence[AttributeDifference], names: Sequence[str]
) -> tuple[str, list[str]] | None:
    lines = [
        str(item)
        for item in differences
        if item.name.rpartition(".")[2] in names or (item.name.partition(".")[0] in ("rope_parameters",) and cause == "rope.scaling")
    ]  # fmt: skip
    return (cause, lines[:4]) if lines else None


def _dropout(
    differences: Sequence[AttributeDifference], facts: tuple[SideFacts, SideFacts]
) -> tuple[str, list[str]] | None:
    modes = [item for item in differences if item.name == "training"]
    rates = [item for item in differences if item.name.rpartition(".")[2] in _DROPOUT]
    set_rates = [
        f"{name}.{key} is {value}"
        for side in facts
        for name, entry in side.modules.items()
        for key, value in entry.attributes.items()
        if key in _DROPOUT and isinstance(value, int | float) and value > 0 and entry.training
    ]
    if modes and set_rates:
        return "mode.dropout", [str(modes[0]), set_rates[0]]
    training = any(entry.training for side in facts for entry in side.modules.values())
    return ("mode.dropout", [str(rates[0])]) if rates and training else None


def _unlike_dtypes(cause: str, result: PointResult) -> tuple[str, list[str]] | None:
    first, second = result.dtypes
    return (cause, [f"it gives {first} in the rollout and {second} in training"]) if first != second else None


def _from_rows(
    comparison: Comparison,
    result: PointResult,
    off: NDArray[np.bool_],
    facts: tuple[SideFacts, SideFacts],
) -> tuple[str, list[str]] | None:
    leaf = result.point.module.rpartition(".")[2]
    if "rotary" in leaf or leaf in ("wpe", "embed_positions"):
        return _positions(comparison, result)
    rows = result.rows
    if rows is None or not belongs_to_attention(result.point.module, facts[0]) or not off.any():
        return None
    touched = sorted({int(label) for label in np.unique(rows.labels[off])})
    spared = {int(label) for label in np.unique(rows.labels)} - set(touched)
    starts = [int(rows.positions[rows.labels == label].min()) for label in touched]
    firsts = [int(rows.positions[off & (rows.labels == label)].min()) for label in touched]
    full = all(
        off[(rows.labels == label) & (rows.positions >= first)].all()
        for label, first in zip(touched, firsts, strict=True)
    )
    cached = facts[0].cached_rows
    if full and cached and min(starts) > 0 and firsts == starts:
        text = f"rows are off only behind a prefix that a cache supplied ({cached} rows were never computed by the rollout)"
        return "kv_cache.stale_prefix", [text]
    packed = [
        side for side, item in zip(("rollout", "train"), facts, strict=True) if "packed" in item.layouts
    ]
    if packed and spared and max(starts) == 0 and _all_rows_of(rows.labels, off, set(touched)):
        text = f"all rows of {len(touched)} sequences are off and {len(spared)} are exact; the {packed[0]} side packs rows"
        return "attention.cross_sequence", [text]
    if full and len(set(firsts)) == 1 and firsts[0] > 1 and max(starts) < firsts[0]:
        text = (
            f"every row from position {firsts[0]} on is off, in all {len(touched)} sequences, and none before"
        )
        return "attention.window", [text]
    return None


def _all_rows_of(labels: NDArray[np.int64], off: NDArray[np.bool_], touched: set[int]) -> bool:
    inside = np.isin(labels, sorted(touched))
    return float(off[inside].mean()) > 0.9 if inside.any() else False


def _positions(comparison: Comparison, result: PointResult) -> tuple[str, list[str]] | None:
    for other in comparison.points:
        point = other.point
        if point.module == result.point.module and point.direction == "input" and point.part == "index":
            if other.status is Status.DIVERGED:
                count = int((other.errors > 0).sum())
                return "rope.positions", [
                    f"it was given other positions in {count} of {len(other.errors)} rows"
                ]
            return None
    return None
