"""The model's weights as a side ran with them: proven by fingerprint, or not used.

Takes the model's parameters and a side's weight records; gives tensors in the side's dtype. A parameter that is not
the one of the side raises; buffers are the model's own, so that a wrong table on a side shows as introduced error.
"""

from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from trainfer.check.align.names import NameMap, parent_of, sibling
from trainfer.check.align.weights import Weight, weights_by_version
from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.tensors import DTYPES
from trainfer.check.replay.rows import MissingRowsError
from trainfer.exact.fingerprint import fingerprint


class SideWeights:
    """What one side's parameters are, in terms of the model's."""

    def __init__(
        self,
        side: ReadableSide,
        label: str,
        names: NameMap,
        reference: Mapping[str, Tensor],
        *,
        other: ReadableSide | None = None,
    ) -> None:
        self._label = label
        self._names = names
        self._reference = reference
        self._versions = weights_by_version(side, names)
        self._others = {} if other is None else weights_by_version(other, names)
        self._proven: dict[str, frozenset[int]] = {}

    def versions(self, name: str) -> frozenset[int] | None:
        """Weights versions in which a parameter is the model's; None where the side recorded no weights at all."""
        if not self._versions:
            return None
        if name not in self._proven:
            self._proven[name] = frozenset(
                version for version, weights in self._versions.items() if self._is_same(name, weights)
            )
        return self._proven[name]

    def refuse(self, names: Iterable[str]) -> NoReturn:
        """Say which parameter is another.

        Raises:
            MissingRowsError: always.
        """
        other = next((name for name in names if self.versions(name) == frozenset()), "a parameter")
        raise MissingRowsError(f"{other} of the {self._label} side is not the model's")

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """The model's parameter in the dtype that the side held it in; a buffer only where both sides held it so."""
        own = self._dtype(name, self._versions)
        is_right = name in self._reference or own == self._dtype(name, self._others)
        return tensor.to(own) if own is not None and is_right and tensor.is_floating_point() else tensor

    def _dtype(self, name: str, versions: Mapping[int, Mapping[str, Weight]]) -> torch.dtype | None:
        found = (self._find(name, weights) for weights in versions.values())
        weight = next((weight for weight in found if weight is not None), None)
        return None if weight is None else DTYPES.get(weight.dtype)

    def _find(self, name: str, weights: Mapping[str, Weight]) -> Weight | None:
        if name in weights:
            return weights[name]
        fused = self._fused(name, weights)
        return None if fused is None else fused[0]

    def _fused(self, name: str, weights: Mapping[str, Weight]) -> tuple[Weight, tuple[str, ...]] | None:
        module, local = parent_of(name), name.rpartition(".")[2]
        for rule in self._names.fused:
            if module.rpartition(".")[2] in rule.parts:
                whole = weights.get(f"{sibling(module, rule.module)}.{local}")
                if whole is not None:
                    return whole, tuple(f"{sibling(module, part)}.{local}" for part in rule.parts)
        return None

    def _is_same(self, name: str, weights: Mapping[str, Weight]) -> bool:
        own = self._reference.get(name)
        if own is None:
            return False
        weight = weights.get(name)
        if weight is None:
            fused = self._fused(name, weights)
            if fused is None or not all(part in self._reference for part in fused[1]):
                return self._is_tied(name, own, weights)
            weight = fused[0]
            own = torch.cat([self._reference[part] for part in fused[1]])
        dtype = DTYPES.get(weight.dtype)
        return dtype is not None and fingerprint(own.to(dtype)) == weight.fingerprint

    def _is_tied(self, name: str, own: Tensor, weights: Mapping[str, Weight]) -> bool:
        """A tied parameter that the side recorded under its other name only."""
        twins = [
            other for other, tensor in self._reference.items() if other != name and _same_storage(tensor, own)
        ]
        return any(other in weights and self._is_same(other, weights) for other in twins)


def _same_storage(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape
