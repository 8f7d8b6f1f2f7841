"""Faults between logits and the recorded log-prob: temperature, masks of the sampler, wrong columns, wire formats.

Takes a pair; changes how a side reads a log-prob, or what it declares.
"""

import torch
from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import END, PAD
from trainfer.faults.pair import Pair, Read
from trainfer.faults.records import Expected
from trainfer.faults.sides import log_softmax

TOP_K = 16
EVAL_TEMPERATURE = 0.7


def declare(pair: Pair, temperature: float) -> None:
    """Sample at a temperature, and both sides say so."""
    pair.rollout.temperature = temperature
    pair.rollout.declared["temperature"] = temperature
    pair.train.declared["temperature"] = temperature


def plant_multiplied(pair: Pair) -> list[Expected]:
    """Logits times the temperature."""
    declare(pair, 1.0 - pair.size)
    pair.read[pair.case.side] = log_softmax(1.0 / (1.0 - pair.size))
    return [Expected(cause="logprob.temperature")]


def plant_undeclared(pair: Pair) -> list[Expected]:
    """The engine samples at the checkpoint's default temperature, and its record says nothing of it."""
    pair.rollout.temperature = EVAL_TEMPERATURE
    pair.read["rollout"] = log_softmax(EVAL_TEMPERATURE)
    return [Expected(cause="logprob.temperature")]


def without(*banned: int) -> Read:
    """Log-probs among the tokens that the sampler allows."""

    def read(logits_V: Tensor, token: int) -> float:
        kept = logits_V.clone()
        kept[[place for place in banned if place != token]] = float("-inf")
        return float(kept.log_softmax(-1)[token])

    return read


def plant_min_tokens(pair: Pair) -> list[Expected]:
    """Processed log-probs: the end and padding are masked before the softmax."""
    pair.read["rollout"] = without(END, PAD)
    return [Expected(cause="logprob.filtered")]


def plant_train_top_k(pair: Pair) -> list[Expected]:
    """The trainer repeats the sampler's top-k, the rollout records raw log-probs."""
    pair.rollout.top_k = TOP_K
    pair.read["train"] = lambda logits, token: _within(logits, token, TOP_K)
    return [Expected(cause="logprob.filtered")]


def _within(logits_V: Tensor, token: int, count: int) -> float:
    kept = torch.cat([logits_V.topk(count).indices, torch.tensor([token])]).unique()
    return float(logits_V[token] - logits_V[kept].logsumexp(-1))


def plant_times(pair: Pair) -> list[Expected]:
    """The temperature is applied to the log-prob, not to the logits."""
    temperature = 1.0 - pair.size
    declare(pair, temperature)
    pair.read[pair.case.side] = lambda logits, token: temperature * float(logits.log_softmax(-1)[token])
    return [Expected(cause="logprob.scaled_after_softmax")]


def _half(logits_V: Tensor, token: int) -> float:
    return float(logits_V.log_softmax(-1)[token].half())


def _entropy(logits_V: Tensor, _token: int) -> float:
    logprobs = logits_V.log_softmax(-1)
    return float(-(logprobs.exp() * logprobs).sum())


def _likeliest(logits_V: Tensor, _token: int) -> float:
    return float(logits_V.log_softmax(-1).max())


def _path(read: Read, pair: Pair) -> list[Expected]:
    pair.read[pair.case.side] = read
    return [Expected(cause="logprob.path")]


FAULTS = (
    Fault(
        name="logprob.temperature/multiplied", plant=plant_multiplied, magnitudes=(0.4, 0.1, 0.02, 0.001),
        summary="logits are multiplied by the temperature 1 − size; both sides declare it",
    ),
    Fault(
        name="logprob.temperature/undeclared", plant=plant_undeclared, sides=("rollout",),
        summary="the engine samples at a default temperature of 0.7 and declares none",
    ),
    Fault(
        name="logprob.filtered/min_tokens", plant=plant_min_tokens, sides=("rollout",),
        summary="the end and padding are masked before the softmax",
    ),
    Fault(
        name="logprob.filtered/train_top_k", plant=plant_train_top_k, sides=("train",),
        summary="the trainer normalises over the 16 likeliest, the rollout over all",
    ),
    Fault(
        name="logprob.scaled_after_softmax/times", plant=plant_times, magnitudes=(0.4, 0.1, 0.02, 0.001),
        summary="the log-prob is multiplied by the temperature 1 − size",
    ),
    Fault(
        name="logprob.path/wire", plant=lambda pair: _path(_half, pair), dtypes=("float32",),
        summary="log-probs travel in float16",
    ),
    Fault(
        name="logprob.path/entropy", plant=lambda pair: _path(_entropy, pair),
        summary="two outputs are taken in the wrong order: the entropy stands for the log-prob",
    ),
    Fault(
        name="logprob.path/likeliest", plant=lambda pair: _path(_likeliest, pair), sides=("rollout",),
        summary="the first entry of the engine's list is taken: the likeliest token's log-prob",
    ),
)  # fmt: skip
