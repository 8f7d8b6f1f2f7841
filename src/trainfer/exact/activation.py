"""SiLU on a CPU in float32 with the same bits for an element wherever it stands, at any number of threads.

Takes a model; lets its SiLU modules compute through ``silu``. PyTorch computes an exponential by vectors, and the few
elements at the end of a thread's share that fill no vector one by one, with other last bits. One thread and two split rows
of a model's width at whole vectors; three and more do not. So from three threads on the elements are handed over in pieces
that PyTorch splits at whole vectors. ``calibration`` is the judge of whether that is enough.

Elsewhere (half precision, other devices, other activations) nothing changes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAIN = 32768
"""Elements below which PyTorch gives an element-wise operation to one thread (``at::internal::GRAIN_SIZE``)."""
_KINDS = frozenset({"SiLU", "SiLUActivation"})
"""Classes of PyTorch and of Transformers that are SiLU and nothing else."""


def silu(values: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``, any shape; autograd as usual."""
    threads = torch.get_num_threads()
    count = values.numel()
    if threads < 3 or count <= GRAIN or values.dtype is not torch.float32 or values.device.type != "cpu":
        return F.silu(values)
    flat = values.reshape(-1)
    whole = count // (threads * GRAIN) * (threads * GRAIN)
    pieces = [*flat[:whole].split(threads * GRAIN), *flat[whole:].split(GRAIN)]
    return torch.cat([F.silu(piece) for piece in pieces if piece.numel()]).view(values.shape)


class RoutedSiLU(nn.Module):
    """SiLU that computes through ``silu``."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``input`` in shape."""
        return silu(input)


def route_activations(model: nn.Module) -> int:
    """Let every SiLU module of ``model`` compute through ``silu``; returns how many do. Only their class changes."""
    plain = [
        module
        for module in model.modules()
        if type(module).__name__ in _KINDS and not getattr(module, "inplace", False)
    ]
    for module in plain:
        module.__class__ = RoutedSiLU
    return len(plain)
