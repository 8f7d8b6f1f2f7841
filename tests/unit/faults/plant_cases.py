"""Where a planted fault first shows: modules that give other outputs on equal inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from trainfer.faults.pair import Pair
from trainfer.faults.sides import padded, train_forward

SEQUENCES = ((5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16), (10, 11, 12, 40, 41, 42, 43), tuple(range(20, 33)))


def leaves(value: Any) -> list[Tensor]:
    """Tensors in a module's arguments or outputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def watched(
    model: nn.Module, pair: Pair, hidden: tuple[str, ...] = ("past_key_values",)
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Module -> (inputs, outputs) of one training forward, in the order in which modules end."""
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    handles = []
    for name, module in model.named_modules():

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            if name not in seen:
                inputs = leaves(args) + leaves({k: v for k, v in kwargs.items() if k not in hidden})
                seen[name] = ([t.clone() for t in inputs], [t.clone() for t in leaves(output)])

        handles.append(module.register_forward_hook(after, with_kwargs=True))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        train_forward(model, SEQUENCES, pair)
    for handle in handles:
        handle.remove()
    return seen


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


def introducing(clean: nn.Module, faulty: nn.Module, pair: Pair, *, masks: bool = True) -> list[str]:
    """Modules whose outputs differ though their inputs do not, innermost ones alone, in the order in which they end."""
    hidden = ("past_key_values",) if masks else ("past_key_values", "attention_mask")
    mine, theirs = watched(clean, pair, hidden), watched(faulty, pair, hidden)
    found = [
        name
        for name in mine
        if name in theirs
        and same(mine[name][0], theirs[name][0])
        and not same(mine[name][1], theirs[name][1])
    ]
    return [name for name in found if not any(other != name and is_inside(other, name) for other in found)]


def is_inside(inner: str, outer: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


def left_padded() -> tuple[Tensor, Tensor]:
    return padded(SEQUENCES, "left")
