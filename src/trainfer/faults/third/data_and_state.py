"""Faults of tokens, weights and policy: the two sides run the same maths on other data, or with other parameters.

Takes a pair; changes what the training side takes for the sequences, or what a model's parameters hold.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import PreTrainedModel

from trainfer.faults.models import END, layer_name, module_of
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected
from trainfer.faults.second.patch import moved, replace_forward, snapshot, write
from trainfer.faults.third.describe import described

UPDATE = 0.2
"""How far an update moves a parameter, of its root mean square: far enough to see."""
Tokens = tuple[int, ...]


# --- tokens ----------------------------------------------------------------------------------------------------------


def _edit(pair: Pair, change: Callable[[int, Tokens, Tokens], tuple[Tokens, Tokens]]) -> None:
    """Let the training side see other (prompt, response) pairs."""

    def edit(batch: Batch) -> Batch:
        pairs = zip(batch.tokens, batch.prompt_lengths, strict=True)
        parts = [change(s, tokens[:n], tokens[n:]) for s, (tokens, n) in enumerate(pairs)]
        return Batch(
            tokens=tuple((*prompt, *response) for prompt, response in parts),
            prompt_lengths=tuple(len(prompt) for prompt, _ in parts),
        )

    pair.train.edit = edit


def _resegmented(pair: Pair) -> Sequence[Expected]:
    """In every other response two ids that spell one word come back as that word's own id."""
    _edit(pair, lambda s, p, r: (p, (*r[:2], (r[2] + r[3]) % 61 + 1, *r[4:]) if s % 2 else r))
    return [Expected(cause="tokens.retokenized")]


def _own_row(pair: Pair) -> Sequence[Expected]:
    """Each token is scored by its own row, as where logits are not moved by one."""

    def shift(_: list[list[float]], rows: list[Tensor], batch: Batch) -> list[list[float]]:
        parts = zip(rows, batch.tokens, batch.prompt_lengths, strict=True)
        return [
            [float(logits[p].log_softmax(-1)[tokens[p]]) for p in range(length, len(tokens))]
            for logits, tokens, length in parts
        ]

    pair.shift["train"] = shift
    return [Expected(cause="tokens.shifted", tokens=Batch.responses)]


def _end_put_in(pair: Pair) -> Sequence[Expected]:
    """The training side puts the prompt's end token before each response, which the rollout did not run."""
    _edit(pair, lambda _, p, r: (p, (END, *r)))
    return [Expected(cause="tokens.inserted")]


def _next_prompt(pair: Pair) -> Sequence[Expected]:
    """Responses of the last two prompts are swapped: joined by an index after a sort by length."""
    prompts = [tuple(prompt) for prompt in pair.rollout.prompts]
    other = (*range(len(prompts) - 2), len(prompts) - 1, len(prompts) - 2)
    _edit(pair, lambda s, _, r: (prompts[other[s]], r))
    return [Expected(cause="tokens.wrong_sample")]


def _cut_left(pair: Pair) -> Sequence[Expected]:
    """Prompts lose their first tokens beyond a limit, as with truncation on the left."""
    _edit(pair, lambda _, p, r: (p[-3:], r))
    return [Expected(cause="tokens.truncated")]


def _rolled(pair: Pair) -> Sequence[Expected]:
    """Labels rolled over the whole pack and cut one row short: the last label is the next sequence's first id."""

    def shift(logprobs: list[list[float]], rows: list[Tensor], batch: Batch) -> list[list[float]]:
        firsts = [tokens[0] for tokens in (*batch.tokens[1:], batch.tokens[0])]
        return [
            [*own[:-1], float(logits[len(tokens) - 2].log_softmax(-1)[first])]
            for own, logits, tokens, first in zip(logprobs, rows, batch.tokens, firsts, strict=True)
        ]

    pair.shift["train"] = shift
    return [
        Expected(
            cause="tokens.packing_roll",
            tokens=lambda batch: {(s, len(tokens) - 1) for s, tokens in enumerate(batch.tokens)},
        )
    ]


def _other_header(pair: Pair) -> Sequence[Expected]:
    """The training side renders the prompt with a system turn and another turn's end."""
    _edit(pair, lambda _, p, r: ((61, 62, 60, *p[:-1], 59), r))
    return [Expected(cause="tokens.template")]


# --- weights after an update -----------------------------------------------------------------------------------------


def _update(pair: Pair, number: int, arrives: Callable[[str], bool]) -> None:
    """One optimizer step on the training side; of its parameters some arrive."""
    new = moved(pair.train_model, UPDATE, torch.Generator().manual_seed(9000 + 10 * pair.seed + number))
    write(pair.train_model, new)
    write(pair.rollout_model, new, arrives)


def _one_late(pair: Pair) -> Sequence[Expected]:
    """A push that races the optimizer: each step the rollout receives the version before."""

    def change(pair: Pair, number: int) -> None:
        before = snapshot(pair.train_model)
        _update(pair, number, lambda _: False)
        write(pair.rollout_model, before)

    pair.steps = 3
    pair.between.append(change)
    return [Expected(cause="weights.stale", modules=("model.embed_tokens",), first_step=1)]


def _fresh_down(pair: Pair) -> Sequence[Expected]:
    """A name that the loader does not know: one matrix keeps the values of its initialisation."""
    name = f"{layer_name(pair.faulty, pair.case.layer)}.mlp.down_proj"
    with torch.no_grad():
        pair.find(name).weight.normal_(0.0, 0.02, generator=pair.random())
    return [Expected(cause="weights.missing", modules=(name,))]


def _loose_head(pair: Pair) -> Sequence[Expected]:
    """The tie is not made: the head has a storage of its own, and an update through the embedding misses it."""
    head: Any = pair.find("lm_head")
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    pair.steps = 2
    pair.between.append(lambda pair, number: _update(pair, number, lambda name: name != "lm_head.weight"))
    return [Expected(cause="weights.tied_head", modules=("lm_head",), first_step=1)]


def _stale_gate_up(pair: Pair) -> Sequence[Expected]:
    """The state dict hands out copies of the fused gate and up projection: an update writes to the copies."""
    pair.steps = 2
    pair.between.append(
        lambda pair, number: _update(
            pair, number, lambda name: "gate_proj" not in name and "up_proj" not in name
        )
    )
    modules = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    return [Expected(cause="weights.fused_copy", modules=modules, first_step=1)]


def _lost_table(pair: Pair) -> Sequence[Expected]:
    """After a wake-up the rotary frequencies hold what lay in that memory."""
    buffer = pair.find("model.rotary_emb").inv_freq
    buffer.copy_(torch.rand(buffer.shape, generator=pair.random()))
    return [Expected(cause="weights.buffer", modules=("model.rotary_emb",))]


def _held_cast(pair: Pair) -> Sequence[Expected]:
    """A layer computes with a copy of its matrix, made at start: updates reach the parameter only."""
    name = f"model.layers.{pair.case.layer}.mlp.up_proj"
    module: Any = pair.find(name)
    held = module.weight.detach().clone()
    replace_forward(module, lambda _, x: torch.nn.functional.linear(x, held))

    def change(pair: Pair, number: int) -> None:
        _update(pair, number, lambda _: True)
        write(pair.clean, snapshot(pair.train_model))

    pair.steps = 2
    pair.weights = "full"
    pair.between.append(change)
    return [Expected(cause="weights.cached_copy", modules=(name,), first_step=1)]


def _two_behind(pair: Pair) -> Sequence[Expected]:
    """The rollout sampled with version 3, and the trainer is at 5: declared, and therefore no mismatch."""
    write(pair.train_model, moved(pair.train_model, pair.size, pair.random()))
    pair.versions = {"rollout": 3, "train": 5}
    return [Expected(cause="policy.staleness")]


# --- adapters --------------------------------------------------------------------------------------------------------


def _with_adapter(model: PreTrainedModel, target: str, seed: int) -> None:
    """LoRA on one kind of linear, both factors set so that it matters."""
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=[target]), model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = (0.15 * torch.randn(parameter.shape, generator=generator)).to(model.dtype)
    model.eval()


def _merge(pair: Pair, target: str, make: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Training and reference carry the adapter; the rollout's own matrices become ``make(base, delta)``."""
    for model in (pair.clean, pair.train_model):
        _with_adapter(model, target, 500 + pair.seed)
    pair.clean = copy.deepcopy(pair.train_model)
    for name in dict(pair.rollout_model.named_modules()):
        if name.rpartition(".")[2] == target:
            delta = module_of(pair.train_model, name).get_delta_weight("default").detach()
            own = module_of(pair.rollout_model, name)
            weight = make(own.weight.detach().float(), delta.float())
            own.weight = torch.nn.Parameter(weight.to(own.weight.dtype))


def _adapter_off(pair: Pair) -> Sequence[Expected]:
    """The engine was started without the adapter."""
    _merge(pair, "down_proj", lambda base, _: base)
    return [Expected(cause="weights.adapter_missing", modules=("model.layers.0.mlp.down_proj",))]


def _adapter_scaled(pair: Pair) -> Sequence[Expected]:
    """The merge scales the adapter by another number than the trainer does."""
    _merge(pair, "v_proj", lambda base, delta: base + pair.size * delta)
    return [Expected(cause="weights.adapter_scale", modules=("model.layers.0.self_attn.v_proj",))]


def _merged_bf16(pair: Pair) -> Sequence[Expected]:
    """Merged on a bfloat16 grid, while the trainer adds the adapter in float32."""
    _merge(pair, "o_proj", lambda base, delta: (base + delta).bfloat16().float())
    return [Expected(cause="weights.rounded_merge", modules=("model.layers.0.self_attn.o_proj",))]


def _head_adapter_off(pair: Pair) -> Sequence[Expected]:
    """The trainer adapts the head, and the engine leaves that part of the adapter out."""
    _merge(pair, "lm_head", lambda base, _: base)
    accepted = ("weights.adapter_missing",)
    return [Expected(cause="head.adapter", accepted=accepted, modules=("lm_head",))]


FAULTS = (
    described("tokens.retokenized/resegmented", _resegmented, sides=("train",)),
    described("tokens.shifted/labels_unmoved", _own_row, sides=("train",)),
    described("tokens.inserted/end_before_response", _end_put_in, sides=("train",)),
    described("tokens.wrong_sample/swapped_after_sort", _next_prompt, sides=("train",)),
    described("tokens.truncated/prompt_cut_left", _cut_left, sides=("train",)),
    described("tokens.packing_roll/pack_cut_short", _rolled, sides=("train",), layouts=("packed",)),
    described("tokens.template/other_header", _other_header, sides=("train",)),
    described("weights.stale/one_push_late", _one_late, sides=("rollout",)),
    described("weights.missing/unknown_name", _fresh_down),
    described("weights.tied_head/loose_head", _loose_head, sides=("rollout",), architectures=("qwen2_tied",)),
    described("weights.fused_copy/gate_up_hook", _stale_gate_up, sides=("rollout",)),
    described("weights.buffer/reused_memory", _lost_table),
    described("weights.cached_copy/held_up_proj", _held_cast, sides=("rollout",)),
    described("weights.adapter_missing/engine_without", _adapter_off, sides=("rollout",)),
    described(
        "weights.adapter_scale/merge_factor", _adapter_scaled, sides=("rollout",), magnitudes=(4.0, 0.5)
    ),
    described("weights.rounded_merge/o_proj_grid", _merged_bf16, sides=("rollout",), dtypes=("float32",)),
    described("head.adapter/engine_without", _head_adapter_off, sides=("rollout",)),
    described("policy.staleness/two_behind", _two_behind, sides=("train",), magnitudes=(0.05, 0.02)),
)
