"""A stream of named tensors -> what vLLM is sent: buckets of whole decoder layers, checked names and shapes.

Takes the actor's tensors under Transformers names and the shapes that the engine has places for. Rotary
buffers are set aside, because vLLM computes its own table from the configuration; tied names are sent once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainfer.errors import WeightSyncError
from trainfer.exact.fingerprint import fingerprint

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_ROTARY = re.compile(r"(^|\.)rotary_emb\.(original_)?inv_freq$")


@dataclass(kw_only=True, slots=True)
class Transfer:
    """One hand-over of all weights: checks while it goes, and remembers what the proof needs."""

    shapes: Mapping[str, tuple[int, ...]]
    """What the engine has places for."""
    ties: Mapping[str, str]
    """Name -> the name that brings its weight."""
    reads_by_product: bool
    """True where weights are read back by a matrix product, which loses signs of zero (``effective.py``)."""
    rotary: dict[str, Tensor] = field(default_factory=dict)
    """Buffers set aside."""
    equivalents: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name -> fingerprint as read back -> fingerprint as sent, where the two can differ."""
    arrived: set[str] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    """Name that brings a tied weight -> its fingerprint."""

    def buckets(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Lists to send one after another.

        Raises:
            WeightSyncError: An unknown name, another shape; at the end: a name that did not come.
        """
        bucket: list[tuple[str, Tensor]] = []
        size, group = 0, None
        for name, tensor in named_tensors:
            if _ROTARY.search(name):
                self.rotary[name] = tensor.detach().clone()
                continue
            self._check(name, tensor)
            if name in self.ties:
                continue
            if layer_of(name) != group and size >= max_bytes:
                yield bucket
                bucket, size = [], 0
            group = layer_of(name)
            bucket.append((name, tensor.detach()))
            size += tensor.numel() * tensor.element_size()
        if bucket:
            yield bucket
        missing = [name for name in self.shapes if self.ties.get(name, name) not in self.arrived]
        if missing:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(f"weights are missing: {listed}; an engine takes all weights at once")

    def _check(self, name: str, tensor: Tensor) -> None:
        if name not in self.shapes:
            raise WeightSyncError(
                f"weight {name!r} has no place in vLLM's model; send the names of the Transformers module, without an adapter's"
            )
        if self.shapes[name] != tuple(tensor.shape):
            raise WeightSyncError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, vLLM's model needs {self.shapes[name]}"
            )
        self.arrived.add(name)
        if self.reads_by_product and tensor.dim() == 2:
            self.equivalents[name] = read_back_equivalents(tensor)
        bringer = self.ties.get(name, name)
        if bringer in self.ties.values():
            value = fingerprint(tensor)
            if self.tied.setdefault(bringer, value) != value:
                raise WeightSyncError(
                    f"weight {name!r} is tied to another name in vLLM's model, but their values differ"
                )


def layer_of(name: str) -> str:
    """What must not be split over buckets: a decoder layer, or else a module. ``model.layers.3.mlp.up_proj.weight``
    -> ``model.layers.3``.
    """
    match = _LAYER.match(name)
    return match.group(1) if match else name.rpartition(".")[0]


def read_back_equivalents(tensor: Tensor) -> dict[str, str]:
    """Fingerprints that a faithful copy can show when it is read back by a product -> that of the tensor.

    Empty for a tensor without negative zeros and subnormal numbers, which is read back bit for bit.
    """
    zeros = (tensor == 0) & tensor.signbit()
    subnormals = (tensor != 0) & (tensor.abs() < torch.finfo(tensor.dtype).tiny)
    if not bool(zeros.any()) and not bool(subnormals.any()):
        return {}
    exact = fingerprint(tensor)
    positive = tensor.masked_fill(zeros, 0.0)
    return {fingerprint(positive): exact, fingerprint(positive.masked_fill(subnormals, 0.0)): exact}
