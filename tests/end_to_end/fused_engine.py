"""An engine-shaped Qwen2: flattened tokens, fused projections, a residual stream in two parts, one shared rotary module.

Made from a Transformers model's weights, so that it computes the same function with other modules. Sequences are given
whole and flattened, as an engine's prefill does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is not None:
            x = x + residual
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return out if residual is None else (out, x)


class FusedLinear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x: Tensor):
        return nn.functional.linear(x, self.weight, self.bias), None


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Rotary(nn.Module):
    def __init__(self, inv_freq: Tensor, head_size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.clone(), persistent=False)
        self.head_size = head_size

    def forward(self, positions: Tensor, query: Tensor, key: Tensor):
        angle = positions[:, None].float() * self.inv_freq
        cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]

        def turn(states: Tensor) -> Tensor:
            heads = states.view(len(states), -1, self.head_size)
            half = self.head_size // 2
            turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
            return (heads * cos + turned * sin).flatten(1)

        return turn(query), turn(key)


class CoreAttention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.sizes = (heads, kv_heads, head_size)
        self.lengths: list[int] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, kv_heads, size = self.sizes
        outputs, start = [], 0
        for length in self.lengths:
            part = slice(start, start + length)
            q = query[part].view(length, heads, size).transpose(0, 1)
            k, v = (
                t[part].view(length, kv_heads, size).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
                for t in (key, value)
            )
            out = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            outputs.append(out.transpose(0, 1).flatten(1))
            start += length
        return torch.cat(outputs)


class Attention(nn.Module):
    def __init__(self, source, config, rotary: Rotary, *, grouped: bool) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.hidden_size // heads
        self.sizes, self.grouped = (heads * size, kv_heads * size), grouped
        parts = [source.q_proj, source.k_proj, source.v_proj]
        weight, bias = torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
        if grouped:
            order = self._grouped_order(heads, kv_heads, size)
            weight, bias = weight[order], bias[order]
            self.order = torch.argsort(order)
        self.qkv_proj = FusedLinear(weight, bias)
        self.rotary_emb = rotary
        self.attn = CoreAttention(heads, kv_heads, size)
        self.o_proj = FusedLinear(source.o_proj.weight, None)

    @staticmethod
    def _grouped_order(heads: int, kv_heads: int, size: int) -> Tensor:
        """For each key/value head: its queries, its key, its value."""
        group = heads // kv_heads
        rows = []
        for kv in range(kv_heads):
            rows += range(kv * group * size, (kv + 1) * group * size)
            rows += range((heads + kv) * size, (heads + kv + 1) * size)
            rows += range((heads + kv_heads + kv) * size, (heads + kv_heads + kv + 1) * size)
        return torch.tensor(rows)

    def forward(self, *, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        if self.grouped:
            qkv = qkv[:, self.order]
        query, key, value = qkv.split([self.sizes[0], self.sizes[1], self.sizes[1]], -1)
        query, key = self.rotary_emb(positions, query, key)
        return self.o_proj(self.attn(query, key, value))[0]


class MLP(nn.Module):
    def __init__(self, source) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(torch.cat([source.gate_proj.weight, source.up_proj.weight]), None)
        self.act_fn = SiluAndMul()
        self.down_proj = FusedLinear(source.down_proj.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, source, config, rotary: Rotary, *, grouped: bool) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(source.input_layernorm.weight, eps)
        self.self_attn = Attention(source.self_attn, config, rotary, grouped=grouped)
        self.post_attention_layernorm = RMSNorm(source.post_attention_layernorm.weight, eps)
        self.mlp = MLP(source.mlp)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None):
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Model(nn.Module):
    def __init__(self, source, config, *, grouped: bool) -> None:
        super().__init__()
        rotary = Rotary(source.rotary_emb.inv_freq, config.hidden_size // config.num_attention_heads)
        self.embed_tokens = nn.Embedding.from_pretrained(
            source.embed_tokens.weight.detach().clone(), freeze=False
        )
        self.layers = nn.ModuleList(Layer(layer, config, rotary, grouped=grouped) for layer in source.layers)
        self.norm = RMSNorm(source.norm.weight, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class LogitsProcessor(nn.Module):
    def forward(self, head: nn.Module, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, head.weight)


class FusedEngine(nn.Module):
    """Takes flattened ids and positions, gives hidden states; logits come from ``logits_processor``."""

    def __init__(self, source, *, grouped: bool = False) -> None:
        super().__init__()
        self.model = Model(source.model, source.config, grouped=grouped)
        self.lm_head = FusedLinear(source.lm_head.weight, None)
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.model(input_ids, positions)
        self.logits_processor(self.lm_head, hidden)
        return hidden

    def run(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        for module in self.modules():
            if isinstance(module, CoreAttention):
                module.lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        return self(ids, torch.cat([torch.arange(len(sequence)) for sequence in sequences]))
