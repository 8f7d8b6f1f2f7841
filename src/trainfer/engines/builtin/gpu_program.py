"""One decode forward on a CUDA device: ids and positions of the slots in, logits out; made to be put in a CUDA graph.

Two programs. ``ModuleProgram`` calls the model's own forward with a plan over the paged cache: any causal LM.
``FusedProgram`` computes the same for decoders of the Llama family (Llama, Qwen2, Qwen3) with a fifth of the kernels:
one product for query, key and value, one for gate and up, and the row-wise work between them fused. It rounds
wherever the modules round, and ``make_program`` adopts it only where it gives the module's own logits bit for bit.

The fused weights are the parameters themselves: parameters become views into one tensor, so weights that are
written in place reach it.

Axes: B slots, H query heads, G key/value heads, K head size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfer.engines.builtin.kv_cache import PagedCache
from trainfer.errors import ModelError
from trainfer.exact.attention import AttentionForm
from trainfer.exact.gpu_attention import decode_forward, supports
from trainfer.exact.gpu_fused import rope_and_store
from trainfer.exact.gpu_linear import TILE_ROWS
from trainfer.exact.gpu_norm import add_norm, rms_norm
from trainfer.exact.gpu_plan import is_plain
from trainfer.exact.gpu_rows import silu_rows
from trainfer.exact.linear import RoutedLinear, linear
from trainfer.exact.packed import CausalModel

FAMILY = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose layers ``FusedProgram`` knows."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """What a decode forward reads; the tensors stay the same, their values move on."""

    input_ids_B: Tensor
    positions_B: Tensor
    table: Tensor
    """``[B, pages of a slot]`` int32."""


class Program(Protocol):
    """A decode forward."""

    def logits(self, state: SlotState, cache: PagedCache) -> Tensor:
        """Logits ``[B, V]`` of each slot's next token; keys and values of the rows go to the cache."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedPlan:
    """One row a slot against the paged cache, for the model's own forward."""

    state: SlotState
    cache: PagedCache
    max_positions: int

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[B, H, K]``."""
        if not is_plain(form, longest=self.max_positions) or not supports(
            query_THK.dtype, query_THK.shape[-1]
        ):
            raise ModelError(
                "the builtin engine's CUDA decode computes neither windows, soft-caps nor head sizes other than powers of "
                "two up to 256; use actor_rollout_ref.rollout.name=hf for this model"
            )
        size, positions = self.cache.block_size, self.state.positions_B
        pages = self.state.table.gather(1, (positions // size)[:, None])[:, 0].to(torch.int64)
        self.cache.write(form.layer, pages * size + positions % size, key_TGK, value_TGK)
        keys, values = self.cache.pools(form.layer)
        return decode_forward(
            query_THK.contiguous(), keys, values, self.state.table, positions, form.scale, page=size
        )


class ModuleProgram:
    """See the module docstring."""

    def __init__(self, model: nn.Module, max_positions: int) -> None:
        self._model = cast(CausalModel, model)
        self._max_positions = max_positions

    def logits(self, state: SlotState, cache: PagedCache) -> Tensor:
        """See ``Program``."""
        output = self._model(
            input_ids=state.input_ids_B[None],
            position_ids=state.positions_B[None],
            use_cache=False,
            logits_to_keep=0,
            attention_plan=PagedPlan(state=state, cache=cache, max_positions=self._max_positions),
        )
        return output.logits[0]


class _Config(Protocol):
    """What the fused program reads from a model's config."""

    hidden_act: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_parameters: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None
    product: Product

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(rows, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    input_norm: tuple[Tensor, float]
    qkv: _Linear
    head_norms: tuple[Tensor, Tensor] | None
    head_eps: float
    scale: float
    output: _Linear
    mlp_norm: tuple[Tensor, float]
    gate_up: _Linear
    down: _Linear


def _joined(modules: list[nn.Module]) -> _Linear:
    """Several linears over the same rows as one; their parameters become views into its tensors."""
    layers = [cast(nn.Linear, module) for module in modules]
    biases = [cast(nn.Parameter, layer.bias) for layer in layers if "bias" in dict(layer.named_parameters())]
    assert len(biases) in (0, len(layers))
    product = linear if isinstance(layers[0], RoutedLinear) else F.linear
    return _Linear(
        weight=_one_tensor([cast(nn.Parameter, layer.weight) for layer in layers]),
        bias=_one_tensor(biases) if biases else None,
        product=product,
    )


def _one_tensor(parameters: list[nn.Parameter]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + len(parameter)]
        start += len(parameter)
    return whole


class FusedProgram:
    """See the module docstring; the caller has asked ``fits``."""

    def __init__(self, model: nn.Module, max_positions: int) -> None:
        config = cast(_Config, vars(model)["config"])
        self._heads = config.num_attention_heads
        self._layers = [self._layer(model, index) for index in range(config.num_hidden_layers)]
        self._embedding = model.get_parameter("model.embed_tokens.weight")
        self._norm = _norm(model.get_submodule("model.norm"))
        self._head = _joined([model.get_submodule("lm_head")])
        positions = torch.arange(max_positions, device=self._embedding.device)[None]
        cosines, sines = model.get_submodule("model.rotary_emb")(self._embedding[:1], positions)
        self._rotary = (cosines[0].contiguous(), sines[0].contiguous())

    def _layer(self, model: nn.Module, index: int) -> _Layer:
        name = f"model.layers.{index}"

        def part(suffix: str) -> nn.Module:
            return model.get_submodule(f"{name}.{suffix}")

        attention = part("self_attn")
        has_norms = "q_norm" in dict(attention.named_children())
        norms = [_norm(part(f"self_attn.{which}_norm")) for which in "qk"] if has_norms else []
        return _Layer(
            input_norm=_norm(part("input_layernorm")),
            qkv=_joined([part(f"self_attn.{which}_proj") for which in "qkv"]),
            head_norms=(norms[0][0], norms[1][0]) if norms else None,
            head_eps=norms[0][1] if norms else 0.0,
            scale=cast(float, vars(attention)["scaling"]),
            output=_joined([part("self_attn.o_proj")]),
            mlp_norm=_norm(part("post_attention_layernorm")),
            gate_up=_joined([part("mlp.gate_proj"), part("mlp.up_proj")]),
            down=_joined([part("mlp.down_proj")]),
        )

    def logits(self, state: SlotState, cache: PagedCache) -> Tensor:
        """See ``Program``."""
        total = F.embedding(state.input_ids_B, self._embedding)
        rows = rms_norm(total, *self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            pools = cache.pools(index)
            query_BHK = rope_and_store(
                layer.qkv(rows), state.positions_B, self._rotary, layer.head_norms, layer.head_eps, state.table, pools,
                query_heads=self._heads, page=cache.block_size,
            )  # fmt: skip
            attended = decode_forward(
                query_BHK, *pools, state.table, state.positions_B, layer.scale, page=cache.block_size
            )
            rows, total = add_norm(total, layer.output(attended.flatten(1)), *layer.mlp_norm)
            added = layer.down(_activated(layer.gate_up(rows)))[: len(rows)]
            is_last = index + 1 == len(self._layers)
            rows, total = add_norm(
                total, added, *(self._norm if is_last else self._layers[index + 1].input_norm)
            )
        return self._head(rows)


def _activated(both: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate, then up, in a tensor of at least ``TILE_ROWS`` rows.

    Rows beyond the given ones are garbage. They are there because a tile that ends beyond its tensor takes longer.
    """
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(max(rows, TILE_ROWS), width, dtype=both.dtype, device=both.device)
    return silu_rows(both[:, :width], both[:, width:], out)


def _norm(module: nn.Module) -> tuple[Tensor, float]:
    return module.get_parameter("weight"), cast(float, vars(module)["variance_epsilon"])


def fits(model: nn.Module) -> bool:
    """Whether ``FusedProgram`` knows the model's class, activation and rotary form."""
    if type(model).__name__ not in FAMILY:
        return False
    config = cast(_Config, vars(model)["config"])
    attention = model.get_submodule("model.layers.0.self_attn")
    mlp = model.get_submodule("model.layers.0.mlp")
    size = attention.get_submodule("q_proj").get_parameter("weight").shape[0] // config.num_attention_heads
    dtype = model.get_parameter("model.embed_tokens.weight").dtype
    return (
        config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type") in ("default", "linear", "llama3")
        and all(name.endswith("weight") for name, _ in mlp.named_parameters())
        # An adapter's layer also has a `weight`: that of the layer that it adapts, which is not what it computes with.
        and all(
            isinstance(module, nn.Linear)
            for name, module in model.named_modules()
            if name.endswith(("_proj", "lm_head"))
        )
        and supports(dtype, size)
    )


@torch.no_grad()
def make_program(
    model: nn.Module, *, max_positions: int, table_positions: int, check: Callable[[Program], Tensor]
) -> Program:
    """The fastest program that gives the module's own bits.

    Args:
        model: A causal LM in half precision on a CUDA device.
        max_positions: Longest sequence.
        table_positions: Positions up to here may be asked for, by slots that overshoot.
        check: Logits of a decode forward of some slots, by a program.
    """
    module = ModuleProgram(model, max_positions)
    if not fits(model):
        return module
    expected = check(module)
    fused = FusedProgram(model, table_positions)
    return fused if torch.equal(check(fused), expected) else module
