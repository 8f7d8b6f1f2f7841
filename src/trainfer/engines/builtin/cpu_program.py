"""One decode forward on a CPU in float32, for decoders of the Llama family (Llama, Qwen2, Qwen3), with few calls.

Takes the rows of a decode step; gives logits. It rounds wherever the modules round, so it gives their bits;
``Decoder.logits`` runs the model's own forward as well in the first steps at each number of rows, compares, and leaves
the work to the module for good if a bit differs. Why it exists: at 16 rows the matrix products of a small model take
less time than Python and PyTorch need to call its modules.

What it saves: query, key and value are one product, gate and up another; weights lie in the layout that oneDNN wants
(a second copy, made anew after ``load_weights``); intermediate results have fixed buffers; rotary tables are looked up.

Axes: B slots, D width, H query heads, G key/value heads, K head size, V vocabulary.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfer.engines.builtin.kv_cache import DecodePlan
from trainfer.exact.attention import DECODE_QUERY_ROWS
from trainfer.exact.linear import RoutedLinear, packed_product, packed_weight
from trainfer.exact.packed import CausalModel

logger = logging.getLogger(__name__)

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""What ``F.scaled_dot_product_attention`` calls on a CPU."""

VECTORS = 32
"""PyTorch computes an exponential in strides of two vectors (AVX-512, float32) and what is left over one by one, with
other last bits. Gate and up lie side by side here, so each row of the gate must be whole strides."""
PROOFS = 3
"""Steps at each number of rows in which both forwards run and are compared."""

FAMILY = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose layers are known here."""


class _Config(Protocol):
    hidden_act: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_parameters: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Product:
    """One or several linears over the same rows."""

    weight: Tensor
    """Packed."""
    bias: Tensor | None

    def __call__(self, rows_BD: Tensor) -> Tensor:
        return packed_product(rows_BD, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    input_norm: _Norm
    qkv: _Product
    head_norm: _Norm | None
    """Of query and key heads, weights ``[H + G, K]``."""
    scale: float
    output: _Product
    mlp_norm: _Norm
    gate_up: _Product
    down: _Product


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    heads: int
    groups: int
    head: int
    width: int
    mlp: int

    @property
    def query_rows(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.groups


class _Buffers:
    """Results of one number of rows, written over by every layer."""

    def __init__(self, rows: int, sizes: _Sizes) -> None:
        heads, groups, head = sizes.heads, sizes.groups, sizes.head
        self.square_BD = torch.empty(rows, sizes.width)
        self.normed_BD = torch.empty(rows, sizes.width)
        self.mean_B1 = torch.empty(rows, 1)
        self.square_BNK = torch.empty(rows, heads + groups, head)
        self.normed_BNK = torch.empty(rows, heads + groups, head)
        self.mean_BN1 = torch.empty(rows, heads + groups, 1)
        self.turned_BNK = torch.empty(rows, heads + groups, head)
        self.query_BGRK = torch.zeros(rows, groups, max(sizes.query_rows, DECODE_QUERY_ROWS), head)
        self.key_BGK = torch.empty(rows, groups, head)
        self.gate_BM = torch.empty(rows, sizes.mlp)


class FusedProgram:
    """See the module docstring; the caller has asked ``fits``."""

    def __init__(self, model: nn.Module, max_positions: int) -> None:
        config = cast(_Config, vars(model)["config"])
        query = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        gate = model.get_parameter("model.layers.0.mlp.gate_proj.weight")
        self._sizes = _Sizes(
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head=query.shape[0] // config.num_attention_heads,
            width=query.shape[1],
            mlp=gate.shape[0],
        )
        self._layers = [self._layer(model, index) for index in range(config.num_hidden_layers)]
        self._embedding = model.get_parameter("model.embed_tokens.weight").detach()
        self._norm = _norm(model.get_submodule("model.norm"))
        self._head = _joined([model.get_submodule("lm_head")])
        positions = torch.arange(max_positions)[None]
        cosines, sines = model.get_submodule("model.rotary_emb")(self._embedding[:1], positions)
        self._cosines, self._sines = cosines[0].contiguous(), sines[0].clone()
        # rotate_half negates the second half before it meets the sine; negating the sine is the same number.
        self._sines[:, : self._sizes.head // 2].neg_()
        self._buffers: dict[int, _Buffers] = {}

    def _layer(self, model: nn.Module, index: int) -> _Layer:
        def part(suffix: str) -> nn.Module:
            return model.get_submodule(f"model.layers.{index}.{suffix}")

        attention = part("self_attn")
        head_norm = None
        if "q_norm" in dict(attention.named_children()):
            query, key = _norm(part("self_attn.q_norm")), _norm(part("self_attn.k_norm"))
            head_norm = _Norm(
                weight=torch.cat(
                    [query.weight.expand(self._sizes.heads, -1), key.weight.expand(self._sizes.groups, -1)]
                ),
                eps=query.eps,
            )
        return _Layer(
            input_norm=_norm(part("input_layernorm")),
            qkv=_joined([part(f"self_attn.{which}_proj") for which in "qkv"]),
            head_norm=head_norm,
            scale=cast(float, vars(attention)["scaling"]),
            output=_joined([part("self_attn.o_proj")]),
            mlp_norm=_norm(part("post_attention_layernorm")),
            gate_up=_joined([part("mlp.gate_proj"), part("mlp.up_proj")]),
            down=_joined([part("mlp.down_proj")]),
        )

    def logits(self, input_ids_B: Tensor, plan: DecodePlan) -> Tensor:
        """Logits ``[B, V]``; keys and values of the rows go to the window."""
        rows = len(input_ids_B)
        if rows not in self._buffers:
            self._buffers[rows] = _Buffers(rows, self._sizes)
        buffers = self._buffers[rows]
        cosines_B1K = self._cosines.index_select(0, plan.positions_B)[:, None]
        sines_B1K = self._sines.index_select(0, plan.positions_B)[:, None]
        mask = plan.mask(None, torch.float32)[:, None, None, :]
        total_BD = self._embedding.index_select(0, input_ids_B)
        for index, layer in enumerate(self._layers):
            normed_BD = _normalise(total_BD, layer.input_norm, buffers)
            attended = self._attend(index, layer, normed_BD, (cosines_B1K, sines_B1K, mask), plan, buffers)
            total_BD.add_(layer.output(attended))
            gate_up = layer.gate_up(_normalise(total_BD, layer.mlp_norm, buffers))
            gate, up = gate_up[:, : self._sizes.mlp], gate_up[:, self._sizes.mlp :]
            total_BD.add_(layer.down(torch.mul(F.silu(gate), up, out=buffers.gate_BM)))
        return self._head(_normalise(total_BD, self._norm, buffers))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        rows_BD: Tensor,
        shared: tuple[Tensor, Tensor, Tensor],
        plan: DecodePlan,
        buffers: _Buffers,
    ) -> Tensor:
        """Attention before its output projection, ``[B, H * K]``."""
        cosines, sines, mask = shared
        heads, groups, size = self._sizes.heads, self._sizes.groups, self._sizes.head
        half = size // 2
        whole = layer.qkv(rows_BD).view(len(rows_BD), heads + 2 * groups, size)
        turning, value_BGK = whole[:, : heads + groups], whole[:, heads + groups :]
        if layer.head_norm is not None:
            turning = _normalise_heads(turning, layer.head_norm, buffers)
        turned = buffers.turned_BNK
        torch.mul(turning[..., half:], sines[..., :half], out=turned[..., :half])
        torch.mul(turning[..., :half], sines[..., half:], out=turned[..., half:])
        level = torch.mul(turning, cosines, out=buffers.square_BNK)
        query_BGRK = buffers.query_BGRK[:, :, : self._sizes.query_rows]
        torch.add(
            level[:, :heads].view(query_BGRK.shape),
            turned[:, :heads].view(query_BGRK.shape),
            out=query_BGRK,
        )
        torch.add(level[:, heads:], turned[:, heads:], out=buffers.key_BGK)
        keys, values = plan.store(index, buffers.key_BGK, value_BGK)
        out = _flash_attention(buffers.query_BGRK, keys, values, attn_mask=mask, scale=layer.scale)[0]
        return out[:, :, : self._sizes.query_rows].reshape(len(rows_BD), heads * size)


def _normalise(rows_BD: Tensor, norm: _Norm, buffers: _Buffers) -> Tensor:
    """As the module: x * rsqrt(mean(x^2) + eps), then times the weight."""
    torch.mul(rows_BD, rows_BD, out=buffers.square_BD)
    torch.mean(buffers.square_BD, -1, keepdim=True, out=buffers.mean_B1)
    torch.mul(rows_BD, buffers.mean_B1.add_(norm.eps).rsqrt_(), out=buffers.normed_BD)
    return buffers.normed_BD.mul_(norm.weight)


def _normalise_heads(rows_BNK: Tensor, norm: _Norm, buffers: _Buffers) -> Tensor:
    torch.mul(rows_BNK, rows_BNK, out=buffers.square_BNK)
    torch.mean(buffers.square_BNK, -1, keepdim=True, out=buffers.mean_BN1)
    torch.mul(rows_BNK, buffers.mean_BN1.add_(norm.eps).rsqrt_(), out=buffers.normed_BNK)
    return buffers.normed_BNK.mul_(norm.weight)


def _norm(module: nn.Module) -> _Norm:
    return _Norm(
        weight=module.get_parameter("weight").detach(), eps=cast(float, vars(module)["variance_epsilon"])
    )


def _joined(modules: list[nn.Module]) -> _Product:
    layers = [cast(nn.Linear, module) for module in modules]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers))
    return _Product(
        weight=packed_weight(torch.cat([layer.weight.detach() for layer in layers])),
        bias=torch.cat(biases) if biases else None,
    )


def fits(model: nn.Module) -> bool:
    """Whether ``FusedProgram`` knows the model's class, numbers, activation and rotary form."""
    if type(model).__name__ not in FAMILY:
        return False
    config = cast(_Config, vars(model)["config"])
    linears = [
        module for name, module in model.named_modules() if name.endswith("_proj") or name == "lm_head"
    ]
    gate = model.get_parameter("model.layers.0.mlp.gate_proj.weight")
    return (
        gate.shape[0] % VECTORS == 0
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type") in ("default", "linear", "llama3")
        and all(type(module) is RoutedLinear for module in linears)
        and all(
            parameter.dtype is torch.float32 and parameter.device.type == "cpu"
            for parameter in model.parameters()
        )
    )


class Decoder:
    """A model's decode forward: fused where that gives the module's bits, the module's own otherwise."""

    def __init__(self, model: nn.Module, max_positions: int) -> None:
        self._model = model
        self._max_positions = max_positions
        self._program: FusedProgram | None = None
        self._is_usable = fits(model)
        self._proofs: Counter[int] = Counter()
        """Steps that were equal, by number of rows."""
        self._hooks = [hooks for module in model.modules() for hooks in _hooks_of(module)]
        """Every module's own hooks, live: walking the modules again at each step would cost a fifth of it."""

    @property
    def is_fused(self) -> bool:
        """True while no bit of the fused forward has differed."""
        return self._is_usable

    def weights_changed(self) -> None:
        """The module holds other weights now."""
        self._program = None

    def logits(self, input_ids_B: Tensor, plan: DecodePlan) -> Tensor:
        """Logits ``[B, V]``; keys and values of the rows go to the plan's window."""
        if not self._is_usable or any(self._hooks):
            return self._by_module(input_ids_B, plan)
        if self._program is None:
            self._program = FusedProgram(self._model, self._max_positions)
        rows = len(input_ids_B)
        if self._proofs[rows] >= PROOFS:
            return self._program.logits(input_ids_B, plan)
        expected = self._by_module(input_ids_B, plan)
        self._is_usable = torch.equal(self._program.logits(input_ids_B, plan), expected)
        self._proofs[rows] += 1
        if not self._is_usable:
            self._program = None
            logger.info(
                "The fused decode forward differs from the model's own at %d rows; it is not used.", rows
            )
        return expected

    def _by_module(self, input_ids_B: Tensor, plan: DecodePlan) -> Tensor:
        model = cast(CausalModel, self._model)
        output = model(
            input_ids=input_ids_B[None],
            position_ids=plan.positions_B[None],
            use_cache=False,
            logits_to_keep=0,
            attention_plan=plan,
        )
        return output.logits[0]


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, object], Mapping[int, object]]:
    """Who wants to see the module at work."""
    return module._forward_hooks, module._forward_pre_hooks
