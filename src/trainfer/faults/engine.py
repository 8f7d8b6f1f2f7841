"""An engine-shaped Qwen2 for the controls: flattened tokens, fused projections, a residual stream in two parts.

Takes a Transformers model; gives the same function in other modules. Sequences are given whole, end to end, as an engine's
prefill does; rows beyond them are dummies.

Axes: T rows, D width, H heads, K head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class EngineNorm(nn.Module):
    """Adds the residual before it normalises; gives both."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.eps = eps

    def forward(self, delta_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalised rows, and the sum where there is a residual."""
        total = delta_TD if residual_TD is None else delta_TD + residual_TD
        x = total.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        out = self.weight * x.to(total.dtype)
        return out if residual_TD is None else (out, total)


class EngineLinear(nn.Module):
    """Gives (output, None), as engines' parallel layers do."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """X Wᵀ + b."""
        return nn.functional.linear(x, self.weight, self.bias), None


class GateAndUp(nn.Module):
    """silu(gate) · up of a fused pair."""

    def forward(self, pair: Tensor) -> Tensor:
        """[T, 2F] -> [T, F]."""
        gate, up = pair.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class EngineRotary(nn.Module):
    """Turns queries and keys itself."""

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, head_size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.detach().clone(), persistent=False)
        self.head_size = head_size

    def forward(self, positions_T: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of all heads, flattened."""
        angles = positions_T[:, None].float() * self.inv_freq
        both = torch.cat([angles, angles], -1)[:, None]
        cos, sin = both.cos().to(query.dtype), both.sin().to(query.dtype)
        first, second = (self._turn(states, cos, sin) for states in (query, key))
        return first, second

    def _turn(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = states.view(len(states), -1, self.head_size)
        low, high = heads.chunk(2, dim=-1)
        return (heads * cos + torch.cat([-high, low], -1) * sin).flatten(1)


class EngineAttention(nn.Module):
    """Causal attention within each sequence; ``lengths`` is set before a run."""

    def __init__(self, heads: int, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self._sizes = (heads, kv_heads, head_size)
        self._lengths: list[int] = []

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Rows of each sequence."""
        self._lengths = list(lengths)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows of all heads, flattened; dummy rows attend to themselves."""
        heads, kv_heads, size = self._sizes
        parts, start = [], 0
        for length in [*self._lengths, *[1] * (len(query) - sum(self._lengths))]:
            rows = slice(start, start + length)
            q = query[rows].view(length, heads, size).transpose(0, 1)
            k, v = (
                t[rows].view(length, kv_heads, size).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
                for t in (key, value)
            )
            scores = q @ k.mT * size**-0.5
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
            parts.append((weights @ v).transpose(0, 1).flatten(1))
            start += length
        return torch.cat(parts)


class EngineSelfAttention(nn.Module):
    """One fused projection, with each key/value head beside its queries where ``grouped``."""

    def __init__(self, source: Any, config: Any, rotary: EngineRotary, *, grouped: bool) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.hidden_size // heads
        parts = [source.q_proj, source.k_proj, source.v_proj]
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        order = _grouped(heads, kv_heads, size) if grouped else torch.arange(len(weight))
        self._split = (heads * size, kv_heads * size, kv_heads * size)
        self._order = torch.argsort(order)
        self.qkv_proj = EngineLinear(weight[order], bias[order])
        self.rotary_emb = rotary
        self.attn = EngineAttention(heads, kv_heads, size)
        self.o_proj = EngineLinear(source.o_proj.weight)

    def forward(self, *, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv[:, self._order].split(self._split, -1)
        query, key = self.rotary_emb(positions, query, key)
        return self.o_proj(self.attn(query, key, value))[0]


def _grouped(heads: int, kv_heads: int, size: int) -> Tensor:
    """Rows of q, k, v in the order: a group's queries, its key, its value."""
    rows: list[int] = []
    queries = heads // kv_heads * size
    for group in range(kv_heads):
        rows += range(group * queries, (group + 1) * queries)
        rows += range((heads + group) * size, (heads + group + 1) * size)
        rows += range((heads + kv_heads + group) * size, (heads + kv_heads + group + 1) * size)
    return torch.tensor(rows)


class EngineMLP(nn.Module):
    """gate_up_proj, act_fn, down_proj."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gate_up_proj = EngineLinear(torch.cat([source.gate_proj.weight, source.up_proj.weight]))
        self.act_fn = GateAndUp()
        self.down_proj = EngineLinear(source.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class EngineLayer(nn.Module):
    """Gives (delta, residual)."""

    def __init__(self, source: Any, config: Any, rotary: EngineRotary, *, grouped: bool) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = EngineNorm(source.input_layernorm.weight, eps)
        self.self_attn = EngineSelfAttention(source.self_attn, config, rotary, grouped=grouped)
        self.post_attention_layernorm = EngineNorm(source.post_attention_layernorm.weight, eps)
        self.mlp = EngineMLP(source.mlp)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One block."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class EngineDecoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, source: Any, config: Any, *, grouped: bool) -> None:
        super().__init__()
        rotary = EngineRotary(source.rotary_emb.inv_freq, config.hidden_size // config.num_attention_heads)
        table = source.embed_tokens.weight.detach().clone()
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(
            EngineLayer(layer, config, rotary, grouped=grouped) for layer in source.layers
        )
        self.norm = EngineNorm(source.norm.weight, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class EngineLogits(nn.Module):
    """Hidden rows to logits, in a module of its own."""

    def forward(self, head: EngineLinear, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, V]."""
        return nn.functional.linear(hidden, head.weight)


class FusedEngine(nn.Module):
    """Takes flattened ids and positions."""

    def __init__(self, source: Any, *, grouped: bool = False) -> None:
        super().__init__()
        self.model = EngineDecoder(source.model, source.config, grouped=grouped)
        self.lm_head = EngineLinear(source.lm_head.weight)
        self.logits_processor = EngineLogits()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden rows; logits come from ``logits_processor``."""
        hidden = self.model(input_ids, positions)
        self.logits_processor(self.lm_head, hidden)
        return hidden

    def run(self, sequences: Sequence[Sequence[int]], *, dummies: int = 0) -> Tensor:
        """One prefill of whole sequences, and dummy rows behind them."""
        for module in self.modules():
            if isinstance(module, EngineAttention):
                module.set_lengths([len(sequence) for sequence in sequences])
        ids = [token for sequence in sequences for token in sequence]
        places = [place for sequence in sequences for place in range(len(sequence))]
        return self(torch.tensor(ids + [0] * dummies), torch.tensor(places + [0] * dummies))
