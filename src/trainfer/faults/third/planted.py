"""All faults of the third generator, and its three controls.

Takes nothing; gives them by name. Names do not meet those of the other two.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from trainfer.faults.answer import read_answer
from trainfer.faults.fault import Control, Fault
from trainfer.faults.pair import Pair, make_pair
from trainfer.faults.records import Answer, Case
from trainfer.faults.second.patch import moved, write
from trainfer.faults.sides import run_pair
from trainfer.faults.third import data_and_state, head_and_cache, layers
from trainfer.integrations.dumps import compare

FAULTS: Mapping[str, Fault] = {
    fault.name: fault for module in (data_and_state, layers, head_and_cache) for fault in module.FAULTS
}


def _run(change: Callable[[Pair], None], seed: int, folder: str, layout: str) -> Answer:
    """Change a pair without spoiling it, run it and compare."""
    case = Case(
        fault="none", cause="none", seed=seed, architecture=("qwen3", "llama", "qwen2")[seed % 3],
        dtype=("float32", "bfloat16")[seed % 2], side="train", layer=0, magnitude=None,
    )  # fmt: skip
    pair = make_pair(case, layout=layout)
    change(pair)
    run_pair(pair, Path(folder))
    return read_answer(compare(Path(folder) / "rollout", Path(folder) / "train", model=pair.clean))


def _other_shapes(pair: Pair) -> None:
    """Chunks of three slots on one side, single sequences padded on the right on the other."""
    pair.rollout.chunk = 3
    pair.train.micro = (1,)


def _fresh_prefix(pair: Pair) -> None:
    """A prefix cache that holds what the rollout's own weights make."""
    pair.rollout.prompts = [[5, 9, 17, 33, 21, 8 + s] for s in range(4)]
    pair.rollout.prefix = 4
    own = copy.deepcopy(pair.rollout_model)
    pair.rollout.prefix_models = [own] * 4


def _arriving_updates(pair: Pair) -> None:
    """Two updates, each of which reaches the rollout whole."""

    def change(pair: Pair, number: int) -> None:
        new = moved(pair.train_model, 0.05, torch.Generator().manual_seed(70 * pair.seed + number))
        write(pair.train_model, new)
        write(pair.rollout_model, new)

    pair.steps = 3
    pair.between.append(change)


CONTROLS: tuple[Control, ...] = (
    Control(
        name="T1 other shapes",
        summary="prefill in chunks of three slots; training in micro-batches of one",
        run=lambda seed, folder: _run(_other_shapes, seed, folder, "right"),
    ),
    Control(
        name="T2 fresh prefix",
        summary="prompts' first tokens come from a prefix cache of the same weights",
        run=lambda seed, folder: _run(_fresh_prefix, seed, folder, "packed"),
    ),
    Control(
        name="T3 updates arrive",
        summary="two updates between steps, each on both sides",
        run=lambda seed, folder: _run(_arriving_updates, seed, folder, "left"),
    ),
)
