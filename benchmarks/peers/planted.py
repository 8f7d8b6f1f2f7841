"""Twelve faults, and three pairs without one, on a tiny Qwen3: what ``compare_findings.py`` and its msProbe peer both run.

Needs torch and Transformers alone, so that either environment makes the same numbers. The rollout side runs eager attention and
has the fault; the training side runs sdpa and has none. Both compute the same whole sequences in one forward call, which is
what msProbe's recipe asks for.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED = 0
PROMPT = 12
LENGTH = 24
VOCABULARY = 260
INSERTED = 7
"""Token that the rollout has once more than training, at the start of the second sequence's response."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planted fault, and what a right answer names."""

    name: str
    what: str
    module: str | None = None
    """Where it was planted; None where no module has it."""
    causes: tuple[str, ...] = ()
    """Ids of trainfer's that are right; empty: none exists, the module is all that can be asked for."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the rollout's model, beside the shared one."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    plant: Callable[[Any], None] = lambda model: None
    positions: Sequence[Sequence[int]] | None = None
    temperature: float = 1.0
    """That the rollout's log-probs were really computed with; it records 1."""
    steps: int = 1
    dtype: torch.dtype = torch.float32
    """Of the rollout."""
    clean: bool = False


def wrap(module: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change what a module computes, inside of any hook on it."""
    module.forward = change(module.forward)  # type: ignore[assignment]


def scaled_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.05)


def table_in_bfloat16(model: Any) -> None:
    def change(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: tuple(table.bfloat16().float() for table in forward(*a, **k))

    wrap(model.model.rotary_emb, change)


def first_key_hidden(model: Any) -> None:
    def change(forward: Callable[..., Any]) -> Callable[..., Any]:
        def hidden(*args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
            mask = attention_mask.clone()
            mask[..., 1:, 0] = torch.finfo(mask.dtype).min
            return forward(*args, attention_mask=mask, **kwargs)

        return hidden

    wrap(model.model.layers[1].self_attn, change)


def head_in_bfloat16(model: Any) -> None:
    weight = model.lm_head.weight
    wrap(model.lm_head, lambda _: lambda x: F.linear(x.bfloat16(), weight.bfloat16()).float())


def one_nan(model: Any) -> None:
    def change(forward: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(x: Tensor) -> Tensor:
            out = forward(x).clone()
            out[0, 15, 3] = float("nan")
            return out

        return spoiled

    wrap(model.model.layers[0].mlp.down_proj, change)


def another_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-5


SHIFTED = [list(range(LENGTH)), [*range(PROMPT), *range(PROMPT + 1, LENGTH + 1)]]
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}

CASES = (
    Case(name="weight", what="one layer's `down_proj` is 5 % too large", module="model.layers.1.mlp.down_proj",
         causes=("weights.",), plant=scaled_weight),
    Case(name="stale", what="`q_proj` of layer 0 missed the last sync", module="model.layers.0.self_attn.q_proj",
         causes=("weights.stale", "weights.missing"), steps=2),
    Case(name="rope-scaling", what="rotary scaling (linear, 2) on one side", module="model.rotary_emb",
         causes=("rope.scaling", "weights.buffer"), config=LINEAR),
    Case(name="rope-bf16", what="rotary table in bfloat16", module="model.rotary_emb", causes=("rope.dtype",),
         plant=table_in_bfloat16),
    Case(name="norm-eps", what="eps of one norm 1e-5 instead of 1e-6", module="model.layers.1.input_layernorm",
         causes=("norm.eps",), plant=another_eps),
    Case(name="mask", what="layer 1 does not see the first token", module="model.layers.1.self_attn",
         causes=("attention.mask",), plant=first_key_hidden),
    Case(name="positions", what="positions of one response are 1 too large", module="model.rotary_emb",
         causes=("rope.positions",), positions=SHIFTED),
    Case(name="activation", what="tanh GELU instead of GELU", module="model.layers.0.mlp.act_fn",
         config={"hidden_act": "gelu_pytorch_tanh"}, shared={"hidden_act": "gelu"}),
    Case(name="head-bf16", what="output head in bfloat16", module="lm_head", causes=("head.dtype",),
         plant=head_in_bfloat16),
    Case(name="temperature", what="log-probs at temperature 0.7, said to be 1", causes=("logprob.temperature",),
         temperature=0.7),
    Case(name="token", what="a token inserted in one sequence", causes=("tokens.inserted",)),
    Case(name="nan", what="one NaN out of `down_proj` of layer 0", module="model.layers.0.mlp.down_proj", plant=one_nan),
    Case(name="clean", what="no fault: eager against sdpa", clean=True),
    Case(name="clean-bf16", what="no fault: bfloat16 on both sides", clean=True, dtype=torch.bfloat16),
    Case(name="clean-batch", what="no fault: sequences in another order, padded", clean=True),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def make_model(case: Case, side: str) -> Any:
    """The model of a side: ``rollout``, ``train``, or ``reference`` (training's, before any step)."""
    own = case.config if side == "rollout" else {}
    config = Qwen3Config(**{
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
        "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **case.shared, **own,
    })  # fmt: skip
    config._attn_implementation = "eager" if side == "rollout" else "sdpa"
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.mul_(1 + 0.1 * torch.randn_like(parameter))
    if side == "rollout":
        case.plant(model)
    return model.to(case.dtype) if case.clean else model


def make_inputs(case: Case, side: str) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Token ids of each sequence, and the arguments of the forward call."""
    draw = torch.Generator().manual_seed(SEED + 1)
    rows = torch.randint(1, VOCABULARY, (2, LENGTH), generator=draw).tolist()
    if case.name == "clean-batch":
        rows[0] = rows[0][:-4]
    if case.name == "token" and side == "rollout":
        rows[1].insert(PROMPT, INSERTED)
    if case.name == "clean-batch" and side == "train":
        rows.reverse()
    longest = max(len(row) for row in rows)
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    arguments = {"input_ids": padded}
    if len({len(row) for row in rows}) > 1:
        arguments["attention_mask"] = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    if case.positions is not None:
        given = case.positions if side == "rollout" else [list(range(LENGTH))] * 2
        arguments["position_ids"] = torch.tensor(given)
    return rows, arguments


def optimizer_step(model: Any, *, leave_out: str | None) -> None:
    """The same small change of every parameter; ``leave_out`` names one that a sync forgot."""
    draw = torch.Generator().manual_seed(SEED + 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change = 1e-3 * torch.randn(parameter.shape, generator=draw).sign()
            if name != leave_out:
                parameter.add_(change)


class Watch(Protocol):
    """A capture tool, as the sides use it."""

    def forward(self) -> AbstractContextManager[object]:
        """Captures the forward call inside."""
        ...

    def scored(self, sequences: list[list[int]], logprobs: list[list[float]]) -> None:
        """Log-probs of the responses, said to be of temperature 1."""
        ...

    def step(self) -> None:
        """The weights are about to change."""
        ...


def play(case: Case, side: str, open_watch: Callable[[Any], AbstractContextManager[Watch]]) -> None:
    """Run one side of a case under a tool."""
    model = make_model(case, side)
    sequences, arguments = make_inputs(case, side)
    temperature = case.temperature if side == "rollout" else 1.0
    with open_watch(model) as watch:
        for step in range(case.steps):
            if step:
                watch.step()
                optimizer_step(model, leave_out=f"{case.module}.weight" if side == "rollout" else None)
            with watch.forward(), torch.no_grad():
                logits = model(**arguments).logits
            table = (logits.float() / temperature).log_softmax(-1)
            watch.scored(
                sequences,
                [
                    [float(table[row, place - 1, ids[place]]) for place in range(PROMPT, len(ids))]
                    for row, ids in enumerate(sequences)
                ],
            )
