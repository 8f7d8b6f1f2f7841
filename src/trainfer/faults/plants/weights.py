"""weights.*: what the rollout computes with is not what the trainer has.

Where it takes an update to see a fault, the pair runs several steps: the trainer's parameters move, and the way to the
rollout is broken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainfer.faults.fault import Fault
from trainfer.faults.models import attention_name, layer_name, module_of
from trainfer.faults.pair import Pair
from trainfer.faults.plants.modules import replace_forward
from trainfer.faults.records import Expected


@torch.no_grad()
def update(model: PreTrainedModel, size: float, draw: torch.Generator) -> None:
    """An optimizer step's stand-in: every parameter moves by ``size`` times its root mean square."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        parameter.add_(noise * (size * parameter.float().square().mean().sqrt()).to(parameter.dtype))


@torch.no_grad()
def sync(source: PreTrainedModel, target: PreTrainedModel, skip: Callable[[str], bool]) -> None:
    """Copy parameters by name, but for those that are skipped."""
    theirs = dict(target.named_parameters())
    for name, parameter in source.named_parameters():
        if not skip(name):
            theirs[name].copy_(parameter)


def _steps(pair: Pair, count: int, size: float, skip: Callable[[int, str], bool]) -> None:
    draw = pair.random()

    def change(inner: Pair, step: int) -> None:
        update(inner.train_model, size, draw)
        sync(inner.train_model, inner.rollout_model, lambda name: skip(step, name))

    pair.steps = count
    pair.between.append(change)


def plant_stale(pair: Pair) -> Sequence[Expected]:
    """From one step on the rollout keeps the weights that it had."""
    bad = 1 + pair.seed % 3
    _steps(pair, 4, pair.size, lambda step, _: step >= bad)
    return [Expected(cause="weights.stale", modules=_embedding(pair), first_step=bad)]


def _embedding(pair: Pair) -> tuple[str, ...]:
    return ("transformer.wte" if pair.case.architecture == "gpt2" else "model.embed_tokens",)


def plant_skipped(pair: Pair) -> Sequence[Expected]:
    """One parameter is left out of every sync."""
    layer = layer_name(pair.train_model, pair.case.layer)
    names = [name for name, _ in pair.train_model.named_parameters() if name.startswith(layer)]
    skipped = names[(7 * pair.seed + 3) % len(names)]
    _steps(pair, 2, 1e-2, lambda _, name: name == skipped)
    return [
        Expected(
            cause="weights.stale",
            accepted=("weights.missing",),
            modules=(skipped.rpartition(".")[0],),
            first_step=1,
        )
    ]


def plant_bias_missing(pair: Pair) -> Sequence[Expected]:
    """The rollout's model has no bias where the trainer's has one."""
    name = f"{attention_name(pair.rollout_model, pair.case.layer)}.{('q_proj', 'k_proj', 'v_proj')[pair.seed % 3]}"
    module_of(pair.rollout_model, name).register_parameter("bias", None)
    return [Expected(cause="weights.missing", modules=(name,))]


def plant_untied(pair: Pair) -> Sequence[Expected]:
    """The rollout unties the head; syncs reach the embedding alone."""
    head = module_of(pair.rollout_model, "lm_head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    _steps(pair, 2, 1e-2, lambda _, name: name == "lm_head.weight")
    return [Expected(cause="weights.tied_head", modules=("lm_head",), first_step=1)]


_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def plant_fused_stale(pair: Pair) -> Sequence[Expected]:
    """Syncs write into split copies of fused projections; what computes keeps its values."""
    _steps(pair, 2, pair.size, lambda _, name: name.split(".")[-2] in _FUSED)
    return [Expected(cause="weights.fused_copy", modules=("model.layers.0.self_attn.q_proj",), first_step=1)]


def plant_cached_copy(pair: Pair) -> Sequence[Expected]:
    """A layer computes with a copy of its weight that it made before the update; the parameter itself is new."""
    name = f"{layer_name(pair.rollout_model, pair.case.layer)}.mlp.{('gate_proj', 'up_proj', 'down_proj')[pair.seed % 3]}"
    linear = module_of(pair.rollout_model, name)
    held: list[Tensor] = [linear.weight.detach().clone()]

    def forward(module: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, held[0], module.bias)

    replace_forward(linear, forward)
    _steps(pair, 2, pair.size, lambda _, __: False)
    return [Expected(cause="weights.cached_copy", modules=(name,))]


def plant_buffer_lost(pair: Pair) -> Sequence[Expected]:
    """After a sleep the rotary frequencies are what was left in memory: zeros, or a neighbour's numbers."""
    rotary = pair.find("model.rotary_emb")
    junk = torch.zeros_like(rotary.inv_freq)
    if pair.seed % 2:
        junk = torch.rand(junk.shape, generator=pair.random())
    rotary.inv_freq = junk
    return [
        Expected(
            cause="weights.buffer", modules=("model.rotary_emb",), tokens=lambda batch: batch.rows(start=1)
        )
    ]


class Adapted(nn.Module):
    """A linear layer with an adapter, its parts named as PEFT names them."""

    def __init__(self, base: nn.Linear, draw: torch.Generator, *, alpha: float = 8.0, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": alpha / rank}
        with torch.no_grad():
            for part in (self.lora_A["default"], self.lora_B["default"]):
                assert isinstance(part, nn.Linear)
                part.weight.copy_(torch.randn(part.weight.shape, generator=draw) * 0.2)
        self.to(base.weight.dtype)

    def delta(self) -> Tensor:
        """Scaling · B A, ``[out, in]``."""
        a, b = self.lora_A["default"], self.lora_B["default"]
        assert isinstance(a, nn.Linear)
        assert isinstance(b, nn.Linear)
        return self.scaling["default"] * b.weight @ a.weight

    def forward(self, x: Tensor) -> Tensor:
        """Base plus adapter."""
        low = self.lora_A["default"](x)
        return self.base_layer(x) + self.lora_B["default"](low) * self.scaling["default"]


def adapt(pair: Pair, names: Sequence[str], factor: float, *, bf16: bool = False) -> None:
    """Adapters on the training side, ``factor`` times of them merged into the rollout's weights."""
    draw = pair.random()
    for name in names:
        parent, _, own = name.rpartition(".")
        base = pair.train_model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        adapted = Adapted(base, draw)
        setattr(pair.train_model.get_submodule(parent), own, adapted)
        target = module_of(pair.rollout_model, name)
        reference = module_of(pair.clean, name)
        with torch.no_grad():
            target.weight += factor * adapted.delta()
            reference.weight += adapted.delta()
            if bf16:
                target.weight.copy_(target.weight.bfloat16())
    pair.weights = "full"


def _targets(pair: Pair) -> list[str]:
    attention = attention_name(pair.clean, pair.case.layer)
    return [f"{attention}.q_proj", f"{attention}.v_proj"]


def plant_adapter_missing(pair: Pair) -> Sequence[Expected]:
    """The rollout serves the base model without the adapter."""
    adapt(pair, _targets(pair), 0.0)
    pair.weights = "fingerprint" if pair.seed % 2 else "full"
    return [Expected(cause="weights.adapter_missing", modules=(_targets(pair)[0],))]


def plant_adapter_scale(pair: Pair) -> Sequence[Expected]:
    """The adapter is merged with another scaling: alpha / r read wrongly, or counted once per rank."""
    adapt(pair, _targets(pair), 1 + pair.size)
    return [Expected(cause="weights.adapter_scale", modules=(_targets(pair)[0],))]


def plant_merge_rounded(pair: Pair) -> Sequence[Expected]:
    """The adapter is merged and the sum rounded to bfloat16."""
    adapt(pair, _targets(pair), 1.0, bf16=True)
    return [Expected(cause="weights.rounded_merge", modules=(_targets(pair)[0],))]


_ROLLOUT = ("rollout",)
FAULTS = (
    Fault(
        name="weights.stale/all", plant=plant_stale, sides=_ROLLOUT, magnitudes=(1e-2, 1e-3, 1e-1, 1e-4, 1e-5),
        summary="the rollout keeps its weights from one of four steps on (size: relative update)",
        architectures=("qwen2", "qwen3", "llama", "gpt2"), dtypes=("float32",),
    ),
    Fault(
        name="weights.stale/one_parameter", plant=plant_skipped, sides=_ROLLOUT,
        summary="one parameter is left out of the sync", dtypes=("float32",),
    ),
    Fault(
        name="weights.missing/bias", plant=plant_bias_missing, sides=_ROLLOUT, architectures=("qwen2",),
        summary="the rollout has no bias in one projection",
    ),
    Fault(
        name="weights.tied_head/untied", plant=plant_untied, sides=_ROLLOUT, architectures=("qwen2_tied",),
        summary="the rollout's head is untied, syncs reach the embedding alone", dtypes=("float32",),
    ),
    Fault(
        name="weights.fused_copy/split", plant=plant_fused_stale, sides=_ROLLOUT, magnitudes=(1e-2, 1e-3, 1e-1, 1e-4, 1e-5),
        summary="q, k, v, gate and up keep old values in every layer", dtypes=("float32",),
    ),
    Fault(
        name="weights.cached_copy/linear", plant=plant_cached_copy, sides=_ROLLOUT, magnitudes=(1e-1, 1e-2, 1e-3, 1e-4, 1e-6),
        summary="one layer computes with a copy made before the update",
    ),
    Fault(name="weights.buffer/lost", plant=plant_buffer_lost, summary="rotary frequencies are zeros or junk"),
    Fault(
        name="weights.adapter_missing/base", plant=plant_adapter_missing, sides=_ROLLOUT,
        summary="the rollout has the base without the adapter",
    ),
    Fault(
        name="weights.adapter_scale/merged", plant=plant_adapter_scale, sides=_ROLLOUT, dtypes=("float32",),
        magnitudes=(1.0, 0.5, 0.1, 0.01, 1e-3), summary="1 + size times the adapter is merged",
    ),
    Fault(
        name="weights.rounded_merge/bf16", plant=plant_merge_rounded, sides=_ROLLOUT, dtypes=("float32",),
        summary="the merged weight is rounded to bfloat16",
    ),
)  # fmt: skip
