"""RMS norms of Transformers' models on a CUDA device: one kernel, the same for trainer and engine.

Takes a model; lets its RMS norms of the kinds listed below compute through ``exact.gpu_norm`` where their rows are
half precision on a CUDA device. Everywhere else they compute as before. Parameters, names and checkpoints do not
change.
"""

import functools
from typing import Protocol, cast

from torch import Tensor, nn

from trainfer.exact import gpu

KINDS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Classes that compute ``weight * (x * rsqrt(mean(x^2) + variance_epsilon)).to(dtype)``, the mean in float32."""


class RmsNorm(Protocol):
    """What is read of such a norm."""

    weight: Tensor
    variance_epsilon: float


@functools.cache
def _routed(kind: type[nn.Module]) -> type[nn.Module]:
    """The same norm, computing through one kernel where there is one."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        if not gpu.computes(hidden_states):
            return kind.forward(self, hidden_states)
        norm = cast(RmsNorm, self)
        return gpu.rms_norm(hidden_states, norm.weight, norm.variance_epsilon)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__, "__doc__": kind.__doc__})


def route_norms(model: nn.Module) -> int:
    """Let the RMS norms of ``model`` compute through one kernel on a CUDA device; returns how many do.

    A layer keeps its parameters, hooks and place; its class becomes a subclass of its own.
    """
    norms = [
        part
        for part in model.modules()
        if type(part).__name__ in KINDS and type(part).__module__.startswith("transformers.")
    ]
    for norm in norms:
        norm.__class__ = _routed(type(norm))
    return len(norms)
