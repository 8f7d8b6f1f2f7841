"""Named tensors into a module that an engine computes with, in place; a partial set is an error.

Leaves out: where the tensors come from, and caches made with the old weights.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from trainfer.errors import WeightSyncError
from trainfer.exact import fingerprint


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, persistent or not, tied names included."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def fingerprints(module: nn.Module) -> Mapping[str, str]:
    """Fingerprint of every parameter and buffer; a tensor with two names is read once."""
    tensors = named_tensors(module)
    first_name: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_name.setdefault(id(tensor), name)
    found = fingerprint.fingerprints((name, tensors[name]) for name in first_name.values())
    return {name: found[first_name[id(tensor)]] for name, tensor in tensors.items()}


@torch.no_grad()
def copy_weights(module: nn.Module, source: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor into the module, converting dtype and device.

    All parameters and persistent buffers must come, a tied one under at least one of its names; buffers that
    are not persistent may.

    Raises:
        WeightSyncError: A name is unknown or missing, a shape differs, or tied names bring unequal values.
            The module may then hold some of the new weights.
    """
    targets = named_tensors(module)
    arrived: set[int] = set()
    for name, tensor in source:
        if name not in targets:
            raise WeightSyncError(
                f"weight {name!r} has no place in the engine's model; send the names of its state dict"
            )
        target = targets[name]
        if target.shape != tensor.shape:
            raise WeightSyncError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's model needs {tuple(target.shape)}"
            )
        value = tensor.detach().to(device=target.device, dtype=target.dtype)
        if id(target) in arrived and not torch.equal(value, target):
            raise WeightSyncError(
                f"weight {name!r} is tied to another name in the engine's model, but their values differ"
            )
        target.copy_(value)
        arrived.add(id(target))
    needed = {name for name in module.state_dict() if name in targets}
    missing = sorted(name for name in needed if id(targets[name]) not in arrived)
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise WeightSyncError(f"weights are missing: {listed}; an engine takes all weights at once")
