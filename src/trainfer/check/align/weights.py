"""Which weight of one side is which weight of the other, and which weights versions are the same weights.

Takes weight records; gives weights by canonical name and version. Fingerprints of shards are added up. Numbers and
text only; values, where they were captured, are compared in ``compare.weights``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainfer.check.align.names import NameMap, canonical, parent_of
from trainfer.check.align.side import Side
from trainfer.check.dump.records import Role, WeightRecord

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One parameter or buffer of one version."""

    name: str
    module: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    """Of the whole; empty where shards are missing."""
    trainable: bool
    tied_to: str | None
    records: tuple[tuple[int, WeightRecord], ...]
    """(rank, record); several where it is sharded."""


Weights = dict[str, Weight]


def weights_by_version(side: Side, names: NameMap) -> dict[int, Weights]:
    """Version -> canonical name -> weight, in the model's order."""
    found: dict[int, dict[str, list[tuple[int, WeightRecord]]]] = {}
    for rank in side.ranks:
        for record in side.weights(rank):
            version = found.setdefault(record.weights_version, {})
            version.setdefault(weight_name(record.name, names), []).append((rank, record))
    return {
        version: {name: _whole(name, records, names) for name, records in weights.items()}
        for version, weights in found.items()
    }


def weight_name(name: str, names: NameMap) -> str:
    """Canonical module name, then the parameter's own; PEFT's ``base_layer`` is the layer itself."""
    module, _, local = name.rpartition(".")
    module = ".".join(part for part in module.split(".") if part != "base_layer")
    module = canonical(module, names)
    return f"{module}.{local}" if module else local


def _whole(name: str, records: Sequence[tuple[int, WeightRecord]], names: NameMap) -> Weight:
    first = records[0][1]
    tied = None if first.tied_to is None else weight_name(first.tied_to, names)
    distinct = {record.parts: record.fingerprint for _, record in records}
    expected = 1
    for _, _, count in first.parts:
        expected *= count
    whole = add_fingerprints(list(distinct.values())) if len(distinct) == expected else ""
    return Weight(
        name=name,
        module=parent_of(name),
        role=first.role,
        dtype=first.dtype,
        shape=first.shape,
        fingerprint=whole,
        trainable=first.requires_grad,
        tied_to=tied,
        records=tuple(records),
    )


def add_fingerprints(parts: Sequence[str]) -> str:
    """The fingerprint of a whole from those of its shards: sums modulo 2⁶⁴, counts added."""
    if len(parts) == 1:
        return parts[0]
    dtypes, counts, sums = set[str](), 0, [0, 0]
    for part in parts:
        dtype, count, digits = part.split(":")
        dtypes.add(dtype)
        counts += int(count)
        for mix in range(2):
            sums[mix] = (sums[mix] + int(digits[16 * mix : 16 * mix + 16], 16)) & _MASK
    return f"{'+'.join(sorted(dtypes))}:{counts}:{sums[0]:016x}{sums[1]:016x}"


def common_versions(
    rollout: Mapping[int, Weights],
    train: Mapping[int, Weights],
    used: tuple[Sequence[int], Sequence[int]],
) -> tuple[dict[int, int], dict[int, int]]:
    """Each side's versions as common numbers: the same number, else the same fingerprints.

    Args:
        rollout: Weights by version.
        train: Likewise.
        used: Versions that the two sides' calls and sequences name.

    A version without counterpart is left out. Equal numbers with unlike weights still are one version: that they
    differ is a finding, not a reason to compare nothing.
    """
    ours, theirs = {*rollout, *used[0]}, {*train, *used[1]}
    first: dict[int, int] = {}
    second: dict[int, int] = {}
    for version in sorted(ours & theirs):
        first[version] = second[version] = len(first)
    for version in sorted(ours - theirs):
        twin = next(
            (
                other
                for other in sorted(theirs)
                if same_weights(rollout.get(version, {}), train.get(other, {}))
            ),
            None,
        )
        if twin is None:
            continue
        number = second.setdefault(twin, len(first))
        first[version] = number
    for version in sorted(theirs - set(second)):
        twin = next(
            (o for o in sorted(ours) if same_weights(rollout.get(o, {}), train.get(version, {}))), None
        )
        if twin is not None and twin in first:
            second[version] = first[twin]
    return first, second


def same_weights(first: Weights, second: Weights) -> bool:
    """True where there are common parameters and all of them have equal fingerprints."""
    common = [n for n in first if n in second and first[n].role is Role.PARAMETER and first[n].fingerprint]
    return bool(common) and all(first[name].fingerprint == second[name].fingerprint for name in common)
