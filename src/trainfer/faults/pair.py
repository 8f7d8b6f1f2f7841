"""Two sides of one step that agree, ready to be spoiled by a plant.

Takes a case; gives a ``Pair``: two copies of one model, and how each side runs and records. Plants change it; ``sides`` runs
it. It is the one mutable object of the suite.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from trainfer.faults.models import make_model
from trainfer.faults.records import Batch, Case

Read = Callable[[Tensor, int], float]
"""(logits [V] of a row in float32, the scored token) -> the log-prob that a side records."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """How the rollout side generates: prefill with left padding, then decode with a key/value cache."""

    prompts: list[list[int]]
    new: int = 10
    """Tokens per sequence, at most."""
    least: int = 6
    """No sequence ends before so many tokens (an engine's ``min_tokens``)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    declared: dict[str, float | int] = field(default_factory=dict)
    """What the record says of its log-probs' temperature and filters."""
    chunk: int | None = None
    """Slots per prefill call; None prefills at once."""
    make_cache: Callable[[PreTrainedModel], Cache] = lambda model: DynamicCache(config=model.config)
    after_chunk: Callable[[Cache, int], None] | None = None
    """Called with the cache and the slots in it after each prefill chunk but the last."""
    positions: str = "mask"
    """``mask``; ``slots`` counts padding too; ``decode_slots`` does so in decode only."""
    warm_up: bool = False
    """Run dummy batches before the first request."""
    runs_last: bool = False
    """Run the last sampled token too."""
    prefix: int = 0
    """First tokens of each prompt that a prefix cache supplies."""
    prefix_models: Sequence[PreTrainedModel] | None = None
    """Per prompt, the model whose keys and values the prefix cache holds; None: the rollout's own."""


@dataclass(kw_only=True, slots=True)
class Train:
    """How the training side scores the sequences."""

    layout: str = "packed"
    """``packed``, or padded on the ``left`` or ``right``."""
    positions: str = "mask"
    """``mask``, or ``slots`` which counts padding too."""
    leak: bool = False
    """Packed sequences see one another."""
    micro: tuple[int, ...] = (1 << 30,)
    """Sequences per forward, one entry for each pass over all of them."""
    declared: dict[str, float | int] = field(default_factory=dict)
    edit: Callable[[Batch], Batch] | None = None
    """What the training side takes for the sequences: a fault of the data path."""
    grad: bool = False
    """Run the forward as in training, with gradients and a backward pass."""


@dataclass(kw_only=True)
class Pair:
    """Two sides and their case."""

    case: Case
    clean: PreTrainedModel
    """The model that both sides should be: handed to ``compare``."""
    rollout_model: PreTrainedModel
    train_model: PreTrainedModel
    rollout: Rollout
    train: Train
    read: dict[str, Read] = field(default_factory=dict)
    """Side -> how it gets log-probs from logits; not there: log-softmax at the declared temperature."""
    path: dict[str, PreTrainedModel] = field(default_factory=dict)
    """Side -> another model whose log-probs it records."""
    shift: dict[str, Callable[[list[list[float]], list[Tensor], Batch], list[list[float]]]] = field(
        default_factory=dict
    )
    """Side -> what happens to recorded log-probs, given the logits of each sequence's rows."""
    steps: int = 1
    between: list[Callable[["Pair", int], None]] = field(default_factory=list)
    """Called before each step from 1 on: an update and its way to the rollout."""
    versions: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "train": 0})
    """Weights version that each side claims at step 0."""
    weights: str = "fingerprint"

    @property
    def seed(self) -> int:
        """Of the case."""
        return self.case.seed

    def model_of(self, side: str) -> PreTrainedModel:
        """The model of a side."""
        return self.rollout_model if side == "rollout" else self.train_model

    @property
    def faulty(self) -> PreTrainedModel:
        """The model on the side where the fault goes."""
        return self.model_of(self.case.side)

    def find(self, name: str) -> Any:
        """A module of the faulty side."""
        return self.faulty.get_submodule(name)

    @property
    def size(self) -> float:
        """The case's magnitude."""
        assert self.case.magnitude is not None, f"{self.case.fault} has no magnitudes"
        return self.case.magnitude

    def random(self) -> torch.Generator:
        """A generator that belongs to the case alone."""
        number = random.Random(f"{self.case.fault}/{self.seed}").getrandbits(31)
        return torch.Generator().manual_seed(number)


def make_prompts(seed: int) -> list[list[int]]:
    """Four prompts, 3 to 10 tokens; the first two are samples of one prompt. No id is the end's or padding's."""
    draw = random.Random(f"prompts/{seed}")
    lengths = [draw.randint(4, 7), draw.randint(3, 4), draw.randint(8, 10)]
    first, second, third = ([draw.randrange(1, 63) for _ in range(length)] for length in lengths)
    return [first, list(first), second, third]


def make_pair(case: Case, *, layout: str = "packed") -> Pair:
    """A pair that agrees."""
    clean = make_model(case.architecture, seed=case.seed, dtype=case.dtype)
    return Pair(
        case=case,
        clean=clean,
        rollout_model=copy.deepcopy(clean),
        train_model=copy.deepcopy(clean),
        rollout=Rollout(prompts=make_prompts(case.seed)),
        train=Train(layout=layout),
    )
