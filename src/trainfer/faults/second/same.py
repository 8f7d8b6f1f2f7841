"""Controls of the second generator: pairs that compute the same function in another way. Any cause but ``shape.*`` is an alarm.

Takes a seed and a folder; gives what the comparison said.
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfer.faults.answer import read_answer
from trainfer.faults.fault import Control
from trainfer.faults.models import LAYERS, VOCABULARY, layer_name
from trainfer.faults.pair import Pair, make_pair
from trainfer.faults.records import Answer, Case
from trainfer.faults.second import adapters, norms
from trainfer.faults.second.patch import Forward, replace_forward
from trainfer.faults.sides import run_pair
from trainfer.integrations.dumps import compare

ROWS = 80
TEMPERATURE = 0.7
Change = Callable[[Pair], None]


def make(name: str, seed: int, architectures: tuple[str, ...], dtypes: tuple[str, ...]) -> Pair:
    """A pair that agrees, drawn from the control's name and the seed."""
    draw = random.Random(f"{name}/{seed}")
    case = Case(
        fault=name, cause="none", seed=seed, architecture=draw.choice(architectures), dtype=draw.choice(dtypes),
        side=draw.choice(("rollout", "train")), layer=draw.randrange(LAYERS), magnitude=None,
    )  # fmt: skip
    return make_pair(case, layout=draw.choice(("right", "left", "packed")))


def compare_changed(pair: Pair, change: Change, folder: str) -> Answer:
    """Change, run both sides, compare."""
    change(pair)
    run_pair(pair, Path(folder))
    return read_answer(compare(Path(folder, "rollout"), Path(folder, "train"), model=pair.clean))


def alone(pair: Pair) -> None:
    """Every sequence has a training forward to itself; the rollout prefills three slots at a time."""
    pair.train.micro = (1,)
    pair.rollout.chunk = 3


def fused_gate_up(pair: Pair) -> None:
    """Gate and up are one product that is split, with the same weights."""
    for layer in range(LAYERS):
        mlp = pair.find(f"{layer_name(pair.clean, layer)}.mlp")
        weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        width = len(mlp.gate_proj.weight)

        def half(part: slice, fused: Tensor = weight) -> Forward:
            return lambda _, inputs: functional.linear(inputs, fused)[..., part]

        replace_forward(mlp.gate_proj, half(slice(0, width)))
        replace_forward(mlp.up_proj, half(slice(width, None)))


def torch_norms(pair: Pair) -> None:
    """Norms are torch's function, with the model's eps."""

    def by_torch(norm: nn.RMSNorm, eps: float) -> Forward:
        return lambda _, hidden: functional.rms_norm(hidden, norm.weight.shape, norm.weight, eps)

    for norm in norms.norms(pair.faulty):
        replace_forward(norm, by_torch(norm, norm.variance_epsilon))


def sdpa(pair: Pair) -> None:
    """Attention by torch's scaled-dot-product kernel."""
    pair.faulty.set_attn_implementation("sdpa")


def untied_and_equal(pair: Pair) -> None:
    """A tied head becomes a parameter of its own, with the same values."""
    head = pair.find("lm_head")
    head.weight = nn.Parameter(head.weight.detach().clone())


def cut_vocabulary(pair: Pair) -> None:
    """The engine's head has rows of padding and cuts their logits off."""
    head = pair.find("lm_head")
    padded = torch.cat(
        [head.weight.detach(), torch.zeros(ROWS - VOCABULARY, head.weight.shape[1]).to(head.weight)]
    )
    replace_forward(head, lambda _, hidden: functional.linear(hidden, padded)[..., :VOCABULARY])


def adapter_beside_merged(pair: Pair) -> None:
    """The trainer computes with adapters, the rollout with merged weights."""
    deltas = adapters.draw_deltas(pair, adapters.targets(pair))
    adapters.wrap(pair.train_model, deltas)
    for model in (pair.rollout_model, pair.clean):
        adapters.merge(model, deltas)


def temperature_both(pair: Pair) -> None:
    """Both sides scale logits, one by division and one in float64."""
    for declared in (pair.rollout.declared, pair.train.declared):
        declared["temperature"] = TEMPERATURE
    pair.rollout.temperature = TEMPERATURE

    def wide(logits_V: Tensor, token: int) -> float:
        scaled = logits_V.double() / TEMPERATURE
        return float(scaled[token] - scaled.logsumexp(-1))

    pair.read[pair.case.side] = wide


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Same:
    """A change that leaves the function as it is, and the models that it is made in."""

    name: str
    change: Change
    summary: str
    architectures: tuple[str, ...] = ("qwen2", "qwen3", "llama")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def run(self, seed: int, folder: str) -> Answer:
        """One seed."""
        return compare_changed(make(self.name, seed, self.architectures, self.dtypes), self.change, folder)


SAME = (
    Same(name="S1 alone", change=alone, summary="each sequence trains alone, prefill goes in chunks of three"),
    Same(name="S2 fused gate-up", change=fused_gate_up, summary="gate and up are one product, split"),
    Same(
        name="S3 torch norms", change=torch_norms, dtypes=("float32",),
        summary="norms by torch's own function, same eps",
    ),
    Same(name="S4 sdpa", change=sdpa, dtypes=("float32",), summary="attention by torch's kernel on one side"),
    Same(
        name="S5 untied", change=untied_and_equal, architectures=("qwen2_tied",),
        summary="a tied head is a parameter of its own with the same values",
    ),
    Same(name="S6 cut vocabulary", change=cut_vocabulary, summary="a head with padding whose logits are cut off"),
    Same(
        name="S7 adapter", change=adapter_beside_merged, dtypes=("float32",),
        summary="adapters beside their merged weights",
    ),
    Same(
        name="S8 temperature", change=temperature_both,
        summary="temperature 0.7 on both sides, one log-softmax in float64",
    ),
)  # fmt: skip
CONTROLS = tuple(Control(name=same.name, summary=same.summary, run=same.run) for same in SAME)
