"""Stage 2: are the weights and buffers the same?

Takes both sides' fingerprints (and values, where they were captured); gives findings, in the model's order, and how
their versions correspond. Fused parameters need values; without them they are named as not proven.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainfer.check.align.layouts import columns
from trainfer.check.align.names import NameMap, sibling
from trainfer.check.align.weights import Weight, Weights, common_versions, weights_by_version
from trainfer.check.compare.lora import compare_adapters
from trainfer.check.compare.records import Stage, Status, WeightFinding
from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightResult:
    """What stage 2 found."""

    stage: Stage
    findings: tuple[WeightFinding, ...]
    versions: tuple[dict[int, int], dict[int, int]]
    """Each side's versions as common numbers."""
    stale_versions: tuple[int, int] | None
    notes: tuple[str, ...]


def check_weights(
    rollout: ReadableSide,
    train: ReadableSide,
    used: tuple[Sequence[int], Sequence[int]],
    names: NameMap,
    *,
    head_size: int | None,
) -> WeightResult:
    """Compare the weights of every pair of versions that belong together."""
    sides = (rollout, train)
    known = weights_by_version(rollout, names), weights_by_version(train, names)
    versions = common_versions(known[0], known[1], used)
    shared = [
        (a, b) for a, number in versions[0].items() for b, other in versions[1].items() if number == other
    ]
    findings: list[WeightFinding] = []
    notes: dict[str, None] = {}
    compared = 0
    for a, b in shared:
        if a in known[0] and b in known[1]:
            pairing = _Pairing(sides, (known[0][a], known[1][b]), (a, b), names, head_size)
            findings += pairing.findings
            compared += pairing.compared
            notes |= dict.fromkeys(pairing.notes)
    findings = [_with_origin(finding, known) for finding in findings]
    stale = _without_common(used, versions)
    stage = _stage(findings, compared, stale, tuple(notes), known)
    return WeightResult(
        stage=stage, findings=tuple(findings), versions=versions, stale_versions=stale, notes=tuple(notes)
    )


class _Pairing:
    """One version of one side against one of the other."""

    def __init__(
        self,
        sides: tuple[ReadableSide, ReadableSide],
        weights: tuple[Weights, Weights],
        versions: tuple[int, int],
        names: NameMap,
        head_size: int | None,
    ) -> None:
        self._sides, self._weights, self._versions = sides, weights, versions
        self._names, self._head_size = names, head_size
        self.findings: list[WeightFinding] = []
        self.notes: list[str] = []
        self.compared = 0
        explained = self._fused(0) | self._fused(1) | self._adapters(0) | self._adapters(1)
        rollout, train = weights
        for name in rollout:
            if name in train and name not in explained:
                self._one(rollout[name], train[name])
        for side, (mine, other) in enumerate(((rollout, train), (train, rollout))):
            for name, weight in mine.items():
                if name not in other and name not in explained and self._must_exist(weight, mine, other):
                    self._add(weight, "missing_in_train" if side == 0 else "missing_in_rollout")

    def _one(self, a: Weight, b: Weight) -> None:
        if (a.tied_to is None) != (b.tied_to is None) and a.fingerprint != b.fingerprint:
            self._add(a, "tie")
        elif not a.fingerprint or not b.fingerprint:
            self.notes.append(f"{a.name} has no fingerprint of the whole: not proven equal")
        elif is_padded(a, b):
            text = f"{a.shape[0]} rows in the rollout, {b.shape[0]} in training"
            self._add(a, "padded", origin=text)
        elif a.dtype != b.dtype:
            self._unlike_dtypes(a, b)
        elif a.fingerprint != b.fingerprint:
            self._add(a, "differs")
        self.compared += 1

    def _unlike_dtypes(self, a: Weight, b: Weight) -> None:
        first, second = self._value(0, a), self._value(1, b)
        if first is None or second is None:
            self.notes.append(
                f"parameters are {a.dtype} in the rollout and {b.dtype} in training: not proven equal"
            )
        elif first.shape != second.shape or not torch.equal(
            first.to(second.dtype), second.to(first.dtype).to(second.dtype)
        ):
            self._add(a, "differs")

    def _must_exist(self, weight: Weight, mine: Weights, other: Weights) -> bool:
        """A parameter without counterpart is a finding, unless its tie or an adapter says where it went."""
        if weight.role is Role.BUFFER or ".lora_" in f".{weight.name}":
            return False
        if weight.tied_to is not None and weight.tied_to in other:
            return False
        return not any(item.tied_to == weight.name and name in other for name, item in mine.items())

    def _adapters(self, side: int) -> set[str]:
        """Weights that are base and adapter on this side, and one on the other."""
        mine, other = self._weights[side], self._weights[1 - side]
        readers = partial(self._value, side), partial(self._value, 1 - side)
        found = compare_adapters(mine, other, self._sides[side], readers)
        for item in found:
            self.compared += 1
            if item.kind is not None:
                self._add(item.weight, item.kind, origin=item.note)
            elif item.note:
                self.notes.append(item.note)
        return {item.weight.name for item in found}

    def _fused(self, side: int) -> set[str]:
        """Parameters that are one on this side and several on the other."""
        mine, other = self._weights[side], self._weights[1 - side]
        rules = {rule.module: rule for rule in self._names.fused}
        explained: set[str] = set()
        for name, weight in mine.items():
            rule = rules.get(weight.module.rpartition(".")[2])
            local = name.rpartition(".")[2]
            if rule is None or name in other:
                continue
            parts = [f"{sibling(weight.module, part)}.{local}" for part in rule.parts]
            if not all(part in other for part in parts):
                continue
            explained.update([name, *parts])
            self._fused_values(side, weight, [other[part] for part in parts], rule.layouts)
        return explained

    def _fused_values(self, side: int, weight: Weight, parts: list[Weight], layouts: Sequence[str]) -> None:
        whole = self._value(side, weight)
        values = [self._value(1 - side, part) for part in parts]
        if whole is None or any(value is None for value in values):
            self.notes.append('fused parameters are proven only where values were captured (weights="full")')
            return
        widths = [part.shape[0] for part in parts]
        best: list[Weight] | None = None
        for layout in layouts:
            places = [
                columns(layout, widths, place, len(whole), self._head_size) for place in range(len(parts))
            ]
            if not all(places):
                continue
            rows = [torch.cat([whole[start:stop] for start, stop in place]) for place in places]
            wrong = [p for p, row, value in zip(parts, rows, values, strict=True) if not _same(row, value)]
            best = wrong if best is None or len(wrong) < len(best) else best
        self.compared += len(parts)
        for part in parts if best is None else best:
            self._add(part, "differs", origin=f"fused in {weight.name}")

    def _value(self, side: int, weight: Weight) -> Tensor | None:
        if len(weight.records) != 1 or weight.records[0][1].blob is None:
            return None
        rank, record = weight.records[0]
        try:
            return self._sides[side].load(rank, record)
        except DamagedRecordError as error:
            self.notes.append(str(error))
            return None

    def _add(self, weight: Weight, kind: str, *, origin: str = "") -> None:
        self.findings.append(
            WeightFinding(
                name=weight.name,
                module=weight.module,
                kind=kind,
                role=weight.role.value,
                rollout_version=self._versions[0],
                train_version=self._versions[1],
                same_as=origin,
            )
        )


def is_padded(a: Weight, b: Weight) -> bool:
    """More rows on one side, in a head or an embedding: a vocabulary filled up."""
    leaf = a.module.rpartition(".")[2]
    same_width = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[1]
    return (
        same_width and a.shape[0] != b.shape[0] and leaf in ("lm_head", "embed_tokens", "output_layer", "wte")
    )


def _same(row: Tensor, value: Tensor | None) -> bool:
    return value is not None and row.shape == value.shape and torch.equal(row, value)


def _with_origin(
    finding: WeightFinding, known: tuple[Mapping[int, Weights], Mapping[int, Weights]]
) -> WeightFinding:
    """Name the version of the other side that has exactly this weight: it was not updated there."""
    if finding.kind != "differs" or finding.rollout_version is None or finding.train_version is None:
        return finding
    held = known[0][finding.rollout_version].get(finding.name)
    wanted = known[1][finding.train_version].get(finding.name)
    for label, own, others, version in (
        ("train", held, known[1], finding.train_version),
        ("rollout", wanted, known[0], finding.rollout_version),
    ):
        for other, weights in others.items():
            twin = weights.get(finding.name)
            if (
                other != version
                and own is not None
                and twin is not None
                and twin.fingerprint == own.fingerprint
            ):
                return WeightFinding(
                    name=finding.name,
                    module=finding.module,
                    kind="differs",
                    role=finding.role,
                    rollout_version=finding.rollout_version,
                    train_version=finding.train_version,
                    same_as=f"{label} version {other}",
                )
    return finding


def _without_common(
    used: tuple[Sequence[int], Sequence[int]], versions: tuple[dict[int, int], dict[int, int]]
) -> tuple[int, int] | None:
    """A rollout and a train version with no common one, where nothing else could be compared."""
    lonely = [version for version in used[0] if version not in versions[0]]
    others = [version for version in used[1] if version not in versions[1]]
    common = {versions[0][v] for v in used[0] if v in versions[0]} & {
        versions[1][v] for v in used[1] if v in versions[1]
    }
    if common or not used[0] or not used[1]:
        return None
    return (max(lonely, default=max(used[0])), max(others, default=max(used[1])))


def _stage(
    findings: Sequence[WeightFinding],
    compared: int,
    stale: tuple[int, int] | None,
    notes: tuple[str, ...],
    known: tuple[Mapping[int, Weights], Mapping[int, Weights]],
) -> Stage:
    if stale is not None:
        proven = stale[0] in known[0] and stale[1] in known[1]
        text = f"the rollout ran version {stale[0]}, training version {stale[1]}: the policy moved on between them"
        return Stage(name="weights", status=Status.DIVERGED if proven else Status.NOT_CHECKED, summary=text)
    if findings:
        kinds = {
            kind: sum(f.kind == kind for f in findings) for kind in dict.fromkeys(f.kind for f in findings)
        }
        counted = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())
        return Stage(name="weights", status=Status.DIVERGED, summary=f"{compared} compared: {counted}")
    if compared == 0:
        return Stage(name="weights", status=Status.NOT_CHECKED, summary="no weights in common")
    status = Status.ROUNDING if notes else Status.EQUAL
    text = f"{compared} parameters and buffers have equal fingerprints"
    return Stage(name="weights", status=status, summary="; ".join([text, *notes]))
