"""Negative controls N1 to N12: pairs that differ in shape, order or layout and compute the same function.

Takes a seed and a folder; gives what the comparison said. Each must be ``equal`` or ``rounding`` with no cause but
``shape.*``; N12 is a true change of policy, which must be called staleness and nothing else.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch

from trainfer.check.probe.capture import capture
from trainfer.check.probe.given import Rows
from trainfer.faults.answer import read_answer
from trainfer.faults.engine import FusedEngine
from trainfer.faults.fault import Control
from trainfer.faults.models import END, make_model, module_of
from trainfer.faults.pair import Pair, make_pair
from trainfer.faults.plants.weights import update
from trainfer.faults.records import Answer, Case
from trainfer.faults.sides import run_pair, train_forward
from trainfer.integrations.dumps import compare

_DENSE = ("qwen2", "qwen3", "llama", "gpt2", "gemma2")
_LAYOUTS = ("packed", "right", "left")


def _case(seed: int, *, architectures: tuple[str, ...] = _DENSE, dtype: str | None = None) -> Case:
    return Case(
        fault="control", cause="none", seed=seed, architecture=architectures[seed % len(architectures)],
        dtype=dtype or ("float32", "bfloat16")[seed // 2 % 2], side="rollout", layer=0, magnitude=None,
    )  # fmt: skip


def _run(pair: Pair, folder: str) -> Answer:
    run_pair(pair, Path(folder))
    return read_answer(compare(Path(folder) / "rollout", Path(folder) / "train", model=pair.clean))


def _pair(seed: int, change: Callable[[Pair], None] | None = None, **case: object) -> Pair:
    pair = make_pair(_case(seed, **case), layout=_LAYOUTS[seed % 3])  # type: ignore[arg-type]
    if change is not None:
        change(pair)
    return pair


# --- engines with other modules: N1, N2, N4, N5 ----------------------------------------------------------------------


def _sequences(seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    first, second, third = (torch.randint(1, END, (n,), generator=draw).tolist() for n in (7, 6, 9))
    return [first, [*first[:5], *second[:3]], third]


def _fused(seed: int, folder: str, *, grouped: bool, dummies: int = 0) -> Answer:
    """An engine's modules against Transformers' own, on whole sequences."""
    dtype = ("float32", "bfloat16")[seed % 2]
    model = make_model("qwen2", seed=seed, dtype=dtype)
    engine, sequences = FusedEngine(model, grouped=grouped), _sequences(seed)
    flat = [token for sequence in sequences for token in sequence]
    rows = Rows(token_ids=flat + [0] * dummies, sequence_lengths=[len(s) for s in sequences])
    with (
        torch.no_grad(),
        capture(
            engine, Path(folder) / "rollout", side="rollout", pass_name="prefill", rows=rows, weights="full"
        ),
    ):
        engine.run(sequences, dummies=dummies)
    pair = make_pair(_case(seed, architectures=("qwen2",), dtype=dtype), layout=_LAYOUTS[seed % 3])
    with (
        torch.no_grad(),
        capture(model, Path(folder) / "train", side="train", pass_name="old_log_prob", weights="full"),
    ):
        train_forward(model, tuple(map(tuple, sequences)), pair)
    return read_answer(compare(Path(folder) / "rollout", Path(folder) / "train", model=model))


def residual_in_two_parts(seed: int, folder: str) -> Answer:
    """N1: an engine's layers give (delta, residual), Transformers' their sum."""
    return _fused(seed, folder, grouped=False)


def fused_projections(seed: int, folder: str) -> Answer:
    """N2: one qkv and one gate-up projection, keys and values beside their queries."""
    return _fused(seed, folder, grouped=True)


def padded_graph_rows(seed: int, folder: str) -> Answer:
    """N4: a CUDA graph's batch is padded to its size with dummy rows."""
    return _fused(seed, folder, grouped=False, dummies=32 - 22)


def keys_after_rope(seed: int, folder: str) -> Answer:
    """N5: a rotary module that gives turned queries and keys, against one that gives cos and sin."""
    return _fused(seed + 1, folder, grouped=bool(seed % 2))


# --- other calls: N3, N6, N7 -----------------------------------------------------------------------------------------


def warm_up_calls(seed: int, folder: str) -> Answer:
    """N3: the engine runs dummy batches before the first request."""
    return _run(_pair(seed, lambda pair: setattr(pair.rollout, "warm_up", True)), folder)


def last_token_run(seed: int, folder: str) -> Answer:
    """N6: the engine runs the last sampled token too."""
    return _run(_pair(seed, lambda pair: setattr(pair.rollout, "runs_last", True)), folder)


def twins_in_a_group(seed: int, folder: str) -> Answer:
    """N7: samples of one prompt, some with equal responses."""

    def change(pair: Pair) -> None:
        pair.rollout.prompts = [list(pair.rollout.prompts[0]) for _ in range(4)]
        pair.rollout.temperature = 0.3
        pair.rollout.declared = pair.train.declared = {"temperature": 0.3}

    return _run(_pair(seed, change), folder)


# --- training's ways: N8, N9, N10, N11, N12 --------------------------------------------------------------------------


def recomputed(seed: int, folder: str) -> Answer:
    """N8: gradient checkpointing runs layers twice."""

    def change(pair: Pair) -> None:
        pair.train.grad = True
        pair.train_model.train()
        pair.train_model.gradient_checkpointing_enable({"use_reentrant": False})

    return _run(_pair(seed, change), folder)


def bf16_noise(seed: int, folder: str) -> Answer:
    """N9: equal maths in bfloat16, prefill and decode against one forward."""
    return _run(_pair(seed, dtype="bfloat16"), folder)


def another_kernel(seed: int, folder: str) -> Answer:
    """N9 again: PyTorch's fused attention in training."""

    def change(pair: Pair) -> None:
        pair.train_model.set_attn_implementation("sdpa")

    return _run(_pair(seed, change, architectures=("qwen2", "qwen3", "llama", "gpt2")), folder)


def split_batches(seed: int, folder: str) -> Answer:
    """N10: micro-batches of 2, and a second pass with micro-batches of 1 and 3."""

    def change(pair: Pair) -> None:
        pair.train.micro = (2, 1, 3)

    return _run(_pair(seed, change), folder)


def chunked_prefill(seed: int, folder: str) -> Answer:
    """N10 on the other side: prefill in chunks."""

    def change(pair: Pair) -> None:
        pair.rollout.chunk = 3 + seed % 3

    return _run(_pair(seed, change), folder)


def fresh_prefix(seed: int, folder: str) -> Answer:
    """A prefix cache that was cleared at the update: its entries are those of today's weights."""

    def change(pair: Pair) -> None:
        pair.rollout.prompts = [prompt * 3 for prompt in pair.rollout.prompts]
        pair.rollout.prompts = [prompt[:7] for prompt in pair.rollout.prompts]
        pair.rollout.prefix, pair.rollout.prefix_models = 4, [copy.deepcopy(pair.clean)] * 4

    return _run(_pair(seed, change), folder)


def terminal_padding(seed: int, folder: str) -> Answer:
    """N11: sequences end early, and generation runs them on with padding."""

    def change(pair: Pair) -> None:
        pair.rollout.new, pair.rollout.least = 16, 1
        for model in (pair.clean, pair.rollout_model, pair.train_model):
            with torch.no_grad():
                module_of(model, "lm_head").weight[END] += 0.3

    return _run(_pair(seed, change, architectures=("qwen2", "qwen3", "llama")), folder)


def policy_moved(seed: int, folder: str) -> Answer:
    """N12: one optimizer step between sampling and scoring, and both sides say so."""

    def change(pair: Pair) -> None:
        update(pair.train_model, 1e-3, pair.random())
        pair.versions["train"] = 1

    return _run(_pair(seed, change), folder)


def processed_logprobs(seed: int, folder: str) -> Answer:
    """Temperature and nucleus applied and declared on both sides."""

    def change(pair: Pair) -> None:
        pair.rollout.temperature = 0.7
        pair.rollout.declared = pair.train.declared = {"temperature": 0.7}

    return _run(_pair(seed, change), folder)


CONTROLS = (
    Control(
        name="N1 residual in two parts",
        run=residual_in_two_parts,
        summary="(delta, residual) against their sum",
    ),
    Control(
        name="N2 fused projections",
        run=fused_projections,
        summary="qkv and gate-up in one, groups interleaved",
    ),
    Control(name="N3 warm-up", run=warm_up_calls, summary="dummy batches before the first request"),
    Control(name="N4 padded rows", run=padded_graph_rows, summary="a graph's dummy rows"),
    Control(name="N5 rotary", run=keys_after_rope, summary="turned keys against cos and sin"),
    Control(
        name="N6 last token", run=last_token_run, summary="the last sampled token is run by the engine alone"
    ),
    Control(name="N7 twins", run=twins_in_a_group, summary="equal prompts and responses in a group"),
    Control(name="N8 recompute", run=recomputed, summary="gradient checkpointing, forward and backward"),
    Control(name="N9 bf16", run=bf16_noise, summary="equal maths in bfloat16"),
    Control(name="N9 kernel", run=another_kernel, summary="another attention kernel in training"),
    Control(name="N10 splits", run=split_batches, summary="micro-batches of three sizes"),
    Control(name="N10 chunks", run=chunked_prefill, summary="prefill in chunks"),
    Control(name="N11 endings", run=terminal_padding, summary="sequences that end early"),
    Control(
        name="N12 policy moved",
        run=policy_moved,
        allowed=("policy.staleness",),
        summary="one update in between",
    ),
    Control(name="case 17 processed", run=processed_logprobs, summary="a temperature, applied on both sides"),
    Control(name="case 25 fresh prefix", run=fresh_prefix, summary="a prefix cache of today's weights"),
)
