"""Weights from actor to rollout engine, and the proof that they arrived.

Takes the actor's module, whole or sharded over ranks, and an engine; sends every parameter and buffer (those that no
checkpoint holds and tied names included) under its Transformers name, parameters in the format the engine computes in,
then compares the fingerprints of all of them with those that the engine reads from its own tensors afterwards: a
tensor that was skipped, rounded twice, left stale or is on one side only shows.

Of a sharded module every rank sends whole tensors to its own engine. The actor's fingerprints come from the shards, not
from what was gathered: partial sums of each rank, added up over the ranks. All ranks call every function together.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from trainfer.errors import WeightSyncError
from trainfer.exact.fingerprint import fingerprint_text, fingerprints, partial_fingerprint
from trainfer.workers.group import SyncProof
from trainfer.workers.rollout import RolloutWorker

SHOWN_NAMES = 5


def sync_weights(model: nn.Module, rollout: RolloutWorker, *, version: int, dtype: torch.dtype) -> SyncProof:
    """Send the weights and insist on the proof of their arrival.

    Args:
        model: The actor's module.
        rollout: Gets the weights.
        version: Optimizer steps behind them.
        dtype: The engine's format of parameters.

    Raises:
        WeightSyncError: The engine refused the weights, or computes with others; names the first of them.
    """
    proof = send_weights(model, rollout, version=version, dtype=dtype)
    insist(proof)
    return proof


def send_weights(model: nn.Module, rollout: RolloutWorker, *, version: int, dtype: torch.dtype) -> SyncProof:
    """As ``sync_weights``, but a failed proof is returned.

    Raises:
        WeightSyncError: The engine refused the weights.
    """
    rollout.load_weights(sent_tensors(model, dtype), version=version)
    return compare_fingerprints(
        actor_fingerprints(model, dtype), rollout.weight_fingerprints(), version=version
    )


def insist(proof: SyncProof) -> None:
    """Raise unless every fingerprint agrees.

    Raises:
        WeightSyncError: Names the first tensors that differ.
    """
    if proof.matches:
        return
    shown = ", ".join(proof.mismatched[:SHOWN_NAMES])
    more = len(proof.mismatched) - SHOWN_NAMES
    raise WeightSyncError(
        f"after the sync of weights version {proof.weights_version} the rollout engine does not compute with the actor's "
        f"weights: {len(proof.mismatched)} of {proof.tensors} tensors differ or are missing on one side: "
        f"{shown}{f' and {more} more' if more > 0 else ''}. Training on its samples would be off-policy in a "
        "way that nothing corrects; this is a fault of the engine or of its name map."
    )


def sent_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters and buffers, one at a time, so that at most one converted copy exists."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = _in_format(parameter, dtype)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    yield from model.named_buffers(remove_duplicate=False)


def actor_fingerprints(model: nn.Module, dtype: torch.dtype) -> Mapping[str, str]:
    """Of every tensor as it is sent; the same on every rank."""
    named = list(model.named_parameters(remove_duplicate=False))
    shards = {
        name: tensor
        for name, p in named
        if isinstance(p, DTensor) and isinstance(tensor := _in_format(p, dtype), DTensor)
    }
    whole = fingerprints((name, _in_format(p, dtype)) for name, p in named if name not in shards)
    whole |= _summed_over_ranks(shards)
    in_order = {name: whole[name] for name, _ in named}
    return in_order | fingerprints(model.named_buffers(remove_duplicate=False))


def compare_fingerprints(actor: Mapping[str, str], engine: Mapping[str, str], *, version: int) -> SyncProof:
    """By name; a name that one side lacks is a mismatch. Names come in the actor's order."""
    names = list(dict.fromkeys([*actor, *engine]))
    return SyncProof(
        weights_version=version,
        tensors=len(names),
        mismatched=tuple(name for name in names if actor.get(name) != engine.get(name)),
    )


def _in_format(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()


def _summed_over_ranks(shards: Mapping[str, DTensor]) -> dict[str, str]:
    """One all-reduce for all tensors."""
    if not shards:
        return {}
    first = next(iter(shards.values()))
    (axis,) = [number for number, placement in enumerate(first.placements) if isinstance(placement, Shard)]
    group = first.device_mesh.get_group(axis)
    sums_N2 = torch.stack(
        [_partial(tensor, dist.get_rank(group), dist.get_world_size(group)) for tensor in shards.values()]
    )
    dist.all_reduce(sums_N2, group=group)  # integers wrap, as the sums do
    return {
        name: fingerprint_text(tensor.dtype, tensor.numel(), sums)
        for (name, tensor), sums in zip(shards.items(), sums_N2.cpu(), strict=True)
    }


def _partial(tensor: DTensor, rank: int, size: int) -> Tensor:
    """FSDP2 cuts the first dimension into chunks of ceil(length / ranks), the last ones shorter or empty."""
    length = tensor.shape[0]
    start = min(rank * -(-length // size), length)
    return partial_fingerprint(tensor.to_local(), start * (tensor.numel() // length if length else 0))
