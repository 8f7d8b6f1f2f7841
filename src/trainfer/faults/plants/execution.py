"""moe.*, mode.*, shape.*, policy.* and module.unknown: routers, dropout, order of sums, versions, and what fits no rule."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainfer.faults.fault import Fault
from trainfer.faults.models import attention_name, layer_name, module_of
from trainfer.faults.pair import Pair
from trainfer.faults.plants.modules import replace_forward
from trainfer.faults.plants.weights import update
from trainfer.faults.records import Expected

_DENSE = ("qwen2", "qwen3", "llama")


def _gate(pair: Pair) -> tuple[str, Any]:
    name = f"{layer_name(pair.faulty, pair.case.layer)}.mlp.gate"
    return name, pair.find(name)


def _route(module: Any, logits: Tensor, *, normalised: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    shares = logits.float().softmax(-1)
    weights, chosen = shares.topk(module.top_k, dim=-1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def plant_not_normalised(pair: Pair) -> Sequence[Expected]:
    """The chosen experts' weights are not made to sum to one."""
    name, gate = _gate(pair)

    def forward(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
        return _route(module, logits, normalised=False)

    replace_forward(gate, forward)
    return [Expected(cause="moe.routing", modules=(name,))]


def plant_router_noise(pair: Pair) -> Sequence[Expected]:
    """Noise on the router's logits, as jitter that was left on."""
    name, gate = _gate(pair)
    draw = pair.random()

    def forward(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
        noise = torch.randn(logits.shape, generator=draw).to(logits.dtype)
        return _route(module, logits + pair.size * logits.float().std().to(logits.dtype) * noise)

    replace_forward(gate, forward)
    return [Expected(cause="moe.routing", modules=(name,))]


def plant_router_in_bf16(pair: Pair) -> Sequence[Expected]:
    """The router computes in bfloat16 on one side."""
    name, gate = _gate(pair)

    def forward(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = hidden.reshape(-1, module.hidden_dim)
        logits = nn.functional.linear(flat.bfloat16(), module.weight.bfloat16())
        return _route(module, logits.to(hidden.dtype))

    replace_forward(gate, forward)
    return [Expected(cause="moe.routing", modules=(name,))]


def plant_one_expert(pair: Pair) -> Sequence[Expected]:
    """One side routes to one expert where the model has two, in one layer."""
    name, gate = _gate(pair)
    gate.top_k = 1
    return [Expected(cause="moe.routing", modules=(name,))]


def plant_dropout(pair: Pair) -> Sequence[Expected]:
    """The training side runs in training mode, with dropout on attention weights in every layer."""
    model = pair.train_model
    model.train()
    for layer in range(2):
        module_of(model, attention_name(model, layer)).attention_dropout = pair.size
    return [Expected(cause="mode.dropout", modules=(attention_name(model, 0),))]


def plant_dropout_modules(pair: Pair) -> Sequence[Expected]:
    """The same in GPT-2, whose dropouts are modules."""
    model = pair.train_model
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = pair.size
    return [Expected(cause="mode.dropout", modules=("transformer.drop",))]


def _in_parts(module: Any, x: Tensor, parts: int) -> Tensor:
    """A linear layer as tensor-parallel ranks compute it: partial sums, each rounded, then added up."""
    weights, pieces = module.weight.chunk(parts, dim=1), x.chunk(parts, dim=-1)
    total = pieces[0] @ weights[0].T
    for piece, weight in zip(pieces[1:], weights[1:], strict=True):
        total = total + piece @ weight.T
    return total if module.bias is None else total + module.bias


def plant_parallel(pair: Pair) -> Sequence[Expected]:
    """Row-parallel layers add up four ranks' partial sums."""
    model = pair.faulty
    for layer in range(2):
        for name in (f"{attention_name(model, layer)}.o_proj", f"{layer_name(model, layer)}.mlp.down_proj"):
            replace_forward(pair.find(name), lambda module, x: _in_parts(module, x, 4))
    return [
        Expected(
            cause="shape.parallel", accepted=("shape.batch",), modules=("model.layers.0.self_attn.o_proj",)
        )
    ]


def plant_batch_shape(pair: Pair) -> Sequence[Expected]:
    """One side's linear layers sum in another order where many rows come at once; it runs the rows at two batch shapes."""
    model = pair.train_model
    for layer in range(2):
        for name in (f"{attention_name(model, layer)}.o_proj", f"{layer_name(model, layer)}.mlp.down_proj"):
            replace_forward(
                model.get_submodule(name),
                lambda module, x: _in_parts(module, x, 4 if x.shape[:-1].numel() > 25 else 1),
            )
    pair.train.micro = (4, 1)
    return [Expected(cause="shape.batch", modules=("model.layers.0.self_attn.o_proj",))]


def plant_staleness(pair: Pair) -> Sequence[Expected]:
    """The policy has moved between sampling and scoring, and both sides say which version they used."""
    update(pair.train_model, pair.size, pair.random())
    pair.versions["train"] = 1
    return [Expected(cause="policy.staleness")]


def plant_other_dtype(pair: Pair) -> Sequence[Expected]:
    """One whole side computes in bfloat16: its matrices, norms and caches; rotary frequencies stay as they are."""
    for parameter in pair.faulty.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return [Expected(cause="module.dtype", modules=(f"{attention_name(pair.faulty, 0)}.q_proj",))]


def plant_scaled_mlp(pair: Pair) -> Sequence[Expected]:
    """One MLP's output is off by a factor: nothing that the known causes explain."""
    name = f"{layer_name(pair.faulty, pair.case.layer)}.mlp"
    module = pair.find(name)
    own = type(module).forward
    replace_forward(module, lambda mlp, x: own(mlp, x) * (1 + pair.size))
    return [Expected(cause="module.unknown", modules=(name,))]


def plant_other_activation(pair: Pair) -> Sequence[Expected]:
    """SiLU is taken for GELU."""
    name = f"{layer_name(pair.faulty, pair.case.layer)}.mlp.act_fn"
    replace_forward(pair.find(name), lambda _, x: nn.functional.gelu(x))
    return [Expected(cause="module.unknown", modules=(name,))]


def plant_scaled_embedding(pair: Pair) -> Sequence[Expected]:
    """The embedding's output is off by a factor."""
    module = pair.find("model.embed_tokens")
    own = type(module).forward
    replace_forward(module, lambda embedding, ids: own(embedding, ids) * (1 + pair.size))
    return [Expected(cause="module.unknown", modules=("model.embed_tokens",))]


_MOE = ("mixtral",)
_SIZES = (0.1, 1e-2, 1e-3, 1e-4, 1e-6)
FAULTS = (
    Fault(name="moe.routing/not_normalised", plant=plant_not_normalised, architectures=_MOE, summary="experts' weights do not sum to one"),
    Fault(name="moe.routing/noise", plant=plant_router_noise, architectures=_MOE, magnitudes=(0.3, 0.1, 1e-2, 1e-3, 1e-5), summary="noise on one router (size: over its logits' standard deviation)"),
    Fault(name="moe.routing/bf16", plant=plant_router_in_bf16, architectures=_MOE, dtypes=("float32",), summary="one router in bfloat16"),
    Fault(name="moe.routing/one_expert", plant=plant_one_expert, architectures=_MOE, summary="one expert per token in place of two"),
    Fault(name="mode.dropout/attention", plant=plant_dropout, architectures=_DENSE, sides=("train",), magnitudes=(0.1, 0.2, 0.05, 0.01, 0.3), summary="attention dropout is on in training (size: its rate)"),
    Fault(name="mode.dropout/modules", plant=plant_dropout_modules, architectures=("gpt2",), sides=("train",), magnitudes=(0.1, 0.2, 0.05, 0.01, 0.3), summary="GPT-2's dropout is on in training (size: its rate)"),
    Fault(name="shape.parallel/sums", plant=plant_parallel, architectures=_DENSE, summary="row-parallel layers add up four partial sums"),
    Fault(name="shape.batch/rows", plant=plant_batch_shape, architectures=_DENSE, sides=("train",), summary="linear layers sum otherwise where many rows come at once"),
    Fault(name="policy.staleness/declared", plant=plant_staleness, sides=("train",), magnitudes=(1e-2, 1e-3, 1e-1, 1e-4, 1e-5), dtypes=("float32",), summary="training is one update ahead, and says so"),
    Fault(name="module.dtype/bf16", plant=plant_other_dtype, architectures=_DENSE, dtypes=("float32",), summary="a whole side in bfloat16 beside float32"),
    Fault(name="module.unknown/mlp", plant=plant_scaled_mlp, magnitudes=_SIZES, summary="one MLP's output times 1 + size"),
    Fault(name="module.unknown/activation", plant=plant_other_activation, summary="GELU in place of SiLU"),
    Fault(name="module.unknown/embedding", plant=plant_scaled_embedding, magnitudes=_SIZES, summary="the embedding's output times 1 + size"),
)  # fmt: skip
