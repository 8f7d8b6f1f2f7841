"""What the tests of the second generator share: planted pairs, and the modules that differ on equal inputs."""

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor, nn

from trainfer.faults.catalogue import layout_of, make_case
from trainfer.faults.pair import Pair, make_pair
from trainfer.faults.records import Expected
from trainfer.faults.second.planted import FAULTS
from trainfer.faults.sides import Recorded, run_pair, train_forward


def planted(name: str, seed: int = 0, **changes: Any) -> tuple[Pair, list[Expected]]:
    fault = FAULTS[name]
    dtype = "float32" if "float32" in fault.dtypes else "bfloat16"
    case = dataclasses.replace(make_case(fault, seed), dtype=dtype, **changes)
    pair = make_pair(case, layout=layout_of(fault, seed))
    return pair, list(fault.plant(pair))


def right_and_faulty(pair: Pair) -> tuple[nn.Module, nn.Module]:
    sides = {"rollout": pair.rollout_model, "train": pair.train_model}
    faulty = sides.pop(pair.case.side)
    return next(iter(sides.values())), faulty


def sequences(seed: int = 0) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(1, 63) for _ in range(length)) for length in (9, 12, 8))


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [part for part in output if isinstance(part, Tensor)] if isinstance(output, (tuple, list)) else []


def calls_of(model: Any, pair: Pair) -> list[tuple[str, tuple[Any, ...], dict[str, Any], Any]]:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
    root = ("", "model", "transformer")
    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, out, name=name: calls.append((name, args, kwargs, out)), with_kwargs=True
        )
        for name, module in model.named_modules()
        if name not in root
    ]
    with torch.no_grad():
        train_forward(model, sequences(), pair)
    for handle in handles:
        handle.remove()
    return calls


def same_output(first: Any, second: Any, tolerance: float) -> bool:
    left, right = tensors(first)[:3], tensors(second)[:3]
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(left, right, strict=True)
    )


def differing(pair: Pair, tolerance: float) -> list[str]:
    """Smallest modules whose outputs differ on the right side's inputs, in the order in which they run."""
    right, faulty = right_and_faulty(pair)
    own = dict(faulty.named_modules())
    found: list[str] = []
    with torch.no_grad():
        for name, args, kwargs, output in calls_of(right, pair):
            if name in own and not same_output(output, own[name](*args, **kwargs), tolerance):
                found.append(name)
    return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]


def changed(name: str, side: str, **changes: Any) -> tuple[Pair, list[Expected], Recorded, Recorded]:
    pair, expected = planted(name, side=side, **changes)
    rollout, train = run_pair(pair)[-1]
    return pair, expected, rollout, train


def unequal(first: nn.Module, second: nn.Module) -> set[str]:
    other = dict(second.named_parameters())
    return {
        name
        for name, value in first.named_parameters()
        if name in other and not torch.equal(value, other[name])
    }
