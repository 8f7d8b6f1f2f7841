"""Modules of Transformers' Llama family that compute with fewer kernels on a CUDA device, trainer and engine alike.

Takes a model; lets its RMS norms, gated MLPs and attention layers of the kinds listed below compute their row-wise
parts through ``exact.gpu_norm`` and ``exact.gpu_rows`` where the rows are half precision on a CUDA device. Everywhere
else, and where a hook watches a part that would be skipped, they compute as before. Parameters, names, hooks and
checkpoints do not change. MLP and attention give the very bits of the modules' own operators; norms differ from theirs by
the order of summation alone.
"""

import functools
from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor, nn

from trainfer.exact import gpu
from trainfer.exact.attention import ATTENTION_NAME, attention

_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Classes that compute ``weight * (x * rsqrt(mean(x^2) + variance_epsilon)).to(dtype)``, the mean in float32."""
_MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
"""Classes that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
_ATTENTIONS = frozenset({"LlamaAttention", "Qwen2Attention", "Qwen3Attention"})
"""Classes that project, norm heads (Qwen3), turn by rotary positions, attend and project."""


class _RmsNorm(Protocol):
    weight: Tensor
    variance_epsilon: float


class _Mlp(Protocol):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module


class _AttentionConfig(Protocol):
    _attn_implementation: str


class _Attention(Protocol):
    config: _AttentionConfig
    head_dim: int
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    scaling: float
    attention_dropout: float
    training: bool


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _norm_forward(kind: type[nn.Module]) -> Callable[..., Tensor]:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        if not gpu.computes(hidden_states):
            return kind.forward(self, hidden_states)
        norm = cast(_RmsNorm, self)
        return gpu.rms_norm(hidden_states, norm.weight, norm.variance_epsilon)

    return forward


def _mlp_forward(kind: type[nn.Module]) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mlp = cast(_Mlp, self)
        is_silu = type(mlp.act_fn).__name__ in ("SiLUActivation", "SiLU", "RoutedSiLU")
        if not gpu.computes(x) or not is_silu or _is_watched(mlp.act_fn):
            return kind.forward(self, x)
        return mlp.down_proj(gpu.silu_product(mlp.gate_proj(x), mlp.up_proj(x)))

    return forward


def _attention_forward(kind: type[nn.Module]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: object | None = None,
        **others: object,
    ) -> tuple[Tensor, Tensor | None]:
        layer = cast(_Attention, self)
        cosines, sines = position_embeddings
        renamed = others.pop("cache", None)  # so called from Transformers 5.24 on
        held = past_key_values if renamed is None else renamed
        if (
            not gpu.computes(hidden_states)
            or held is not None
            or layer.config._attn_implementation != ATTENTION_NAME
            or cosines.shape[-1] != layer.head_dim
            or len(hidden_states) != 1
        ):
            return kind.forward(self, hidden_states, position_embeddings, attention_mask, held, **others)
        heads = (*hidden_states.shape[:-1], -1, layer.head_dim)
        query, key, value = (
            project(hidden_states).view(heads) for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        parts = dict(self.named_children())
        if "q_norm" in parts:
            query, key = parts["q_norm"](query), parts["k_norm"](key)
        query_THK, key_TGK = gpu.rotate(query[0], key[0], cosines[0], sines[0])
        attended, weights = attention(
            self,
            query_THK.transpose(0, 1)[None],
            key_TGK.transpose(0, 1)[None],
            value.transpose(1, 2),
            attention_mask,
            scaling=layer.scaling,
            dropout=layer.attention_dropout if layer.training else 0.0,
            sliding_window=vars(self).get("sliding_window"),
            **others,  # pyright: ignore[reportArgumentType]
        )
        return layer.o_proj(attended.flatten(2)), weights

    return forward


@functools.cache
def _routed(kind: type[nn.Module]) -> type[nn.Module]:
    """The same module with another forward."""
    name = kind.__name__
    make = _norm_forward if name in _NORMS else _mlp_forward if name in _MLPS else _attention_forward
    return type(name, (kind,), {"forward": make(kind), "__module__": __name__, "__doc__": kind.__doc__})


def route_modules(model: nn.Module) -> int:
    """Let the modules of ``model`` that are listed above compute with fewer kernels; returns how many do.

    A module keeps its parameters, hooks and place; its class becomes a subclass of its own.
    """
    kinds = _NORMS | _MLPS | _ATTENTIONS
    found = [
        part
        for part in model.modules()
        if type(part).__name__ in kinds and type(part).__module__.startswith("transformers.")
    ]
    for part in found:
        part.__class__ = _routed(type(part))
    return len(found)
