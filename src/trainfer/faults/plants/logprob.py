"""logprob.*: equal logits, other log-probs."""

import copy
from collections.abc import Sequence

from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import make_model
from trainfer.faults.pair import Pair
from trainfer.faults.plants.weights import update
from trainfer.faults.records import Batch, Expected
from trainfer.faults.sides import log_softmax


def _responses(batch: Batch) -> set[tuple[int, int]]:
    return batch.responses()


def plant_raw(pair: Pair) -> Sequence[Expected]:
    """One side records raw log-probs of what was sampled at a temperature, the other scaled ones; both say scaled."""
    temperature = 1 - pair.size
    pair.rollout.temperature = temperature
    pair.rollout.declared = pair.train.declared = {"temperature": temperature}
    pair.read[pair.case.side] = log_softmax(1.0)
    return [Expected(cause="logprob.temperature", tokens=_responses)]


def plant_undivided(pair: Pair) -> Sequence[Expected]:
    """The training side never divides by the temperature, and says so."""
    temperature = 1 + pair.size
    pair.rollout.temperature = temperature
    pair.rollout.declared = {"temperature": temperature}
    pair.train.declared = {"temperature": 1.0}
    return [Expected(cause="logprob.temperature", tokens=_responses)]


def plant_top_p(pair: Pair) -> Sequence[Expected]:
    """The rollout's log-probs are those of the nucleus, the training side's of the whole vocabulary."""
    pair.rollout.top_p = pair.size
    pair.rollout.declared = {"top_p": pair.size} if pair.seed % 2 else {}
    pair.read["rollout"] = log_softmax(1.0, top_p=pair.size)
    return [Expected(cause="logprob.filtered", tokens=_responses)]


def plant_top_k(pair: Pair) -> Sequence[Expected]:
    """As with top-p, for the k likeliest tokens."""
    pair.rollout.top_k = int(pair.size)
    pair.rollout.declared = {"top_k": int(pair.size)} if pair.seed % 2 else {}
    pair.read["rollout"] = log_softmax(1.0, top_k=int(pair.size))
    return [Expected(cause="logprob.filtered", tokens=_responses)]


def plant_divided_after(pair: Pair) -> Sequence[Expected]:
    """One side divides log-probs by the temperature, after the softmax."""
    temperature = 1 - pair.size
    pair.rollout.temperature = temperature
    pair.rollout.declared = pair.train.declared = {"temperature": temperature}
    own = log_softmax(1.0)
    pair.read[pair.case.side] = lambda logits, token: own(logits, token) / temperature
    return [Expected(cause="logprob.scaled_after_softmax", tokens=_responses)]


def plant_reference_path(pair: Pair) -> Sequence[Expected]:
    """One side records the reference policy's log-probs in place of the actor's."""
    other = copy.deepcopy(pair.clean)
    update(other, pair.size, pair.random())
    pair.path[pair.case.side] = other
    return [Expected(cause="logprob.path", tokens=_responses)]


def plant_softmax_in_bf16(pair: Pair) -> Sequence[Expected]:
    """One side takes the log-softmax in bfloat16."""

    def read(logits: Tensor, token: int) -> float:
        return float(logits.bfloat16().log_softmax(-1)[token])

    pair.read[pair.case.side] = read
    return [Expected(cause="logprob.path", tokens=_responses)]


def plant_autocast_path(pair: Pair) -> Sequence[Expected]:
    """One side's log-probs come from a second forward of the same weights in bfloat16, not from the forward that is seen."""
    pair.path[pair.case.side] = make_model(pair.case.architecture, seed=pair.seed, dtype="bfloat16")
    return [Expected(cause="logprob.path", tokens=_responses)]


_SIZES = (0.4, 0.1, 0.02, 1e-3, 1e-5)
FAULTS = (
    Fault(name="logprob.temperature/raw", plant=plant_raw, magnitudes=_SIZES, summary="raw log-probs beside those at temperature 1 − size; both declare the temperature"),
    Fault(name="logprob.temperature/undivided", plant=plant_undivided, magnitudes=_SIZES, sides=("train",), summary="training does not divide by the temperature 1 + size"),
    Fault(name="logprob.filtered/top_p", plant=plant_top_p, magnitudes=(0.8, 0.9, 0.95, 0.99, 0.999), sides=("rollout",), summary="the rollout's log-probs are those of the nucleus (size: top-p)"),
    Fault(name="logprob.filtered/top_k", plant=plant_top_k, magnitudes=(4.0, 8.0, 16.0, 32.0, 48.0), sides=("rollout",), summary="the rollout's log-probs are those of the k likeliest (size: k)"),
    Fault(name="logprob.scaled_after_softmax/divided", plant=plant_divided_after, magnitudes=_SIZES, summary="log-probs divided by the temperature 1 − size"),
    Fault(name="logprob.path/reference", plant=plant_reference_path, magnitudes=(0.1, 1e-2, 1e-3, 1e-4, 1e-6), summary="log-probs of another policy (size: relative distance of its weights)"),
    Fault(name="logprob.path/softmax", plant=plant_softmax_in_bf16, summary="the log-softmax is taken in bfloat16"),
    Fault(name="logprob.path/autocast", plant=plant_autocast_path, dtypes=("float32",), summary="log-probs of a second forward in bfloat16"),
)  # fmt: skip
