"""Weights from actor to rollout engine, and the proof that they arrived.

Takes the actor's module and an engine; sends every parameter and buffer (those that no checkpoint holds and
tied names included) under its Transformers name, parameters in the format the engine computes in, then
compares the fingerprints of all of them with those that the engine reads from its own tensors afterwards: a
tensor that was skipped, rounded twice, left stale or is on one side only shows.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from trainfer.errors import WeightSyncError
from trainfer.exact.fingerprint import fingerprint
from trainfer.workers.group import SyncProof
from trainfer.workers.rollout import RolloutWorker

SHOWN_NAMES = 5


def sync_weights(model: nn.Module, rollout: RolloutWorker, *, version: int, dtype: torch.dtype) -> SyncProof:
    """Send the weights and prove their arrival.

    Args:
        model: The actor's module.
        rollout: Gets the weights.
        version: Optimizer steps behind them.
        dtype: The engine's format of parameters.

    Raises:
        WeightSyncError: The engine refused the weights, or computes with others; names the first of them.
    """
    rollout.load_weights(sent_tensors(model, dtype), version=version)
    proof = compare_fingerprints(
        actor_fingerprints(model, dtype), rollout.weight_fingerprints(), version=version
    )
    if not proof.matches:
        shown = ", ".join(proof.mismatched[:SHOWN_NAMES])
        more = len(proof.mismatched) - SHOWN_NAMES
        raise WeightSyncError(
            f"after the sync of weights version {version} the rollout engine does not compute with the actor's "
            f"weights: {len(proof.mismatched)} of {proof.tensors} tensors differ or are missing on one side: "
            f"{shown}{f' and {more} more' if more > 0 else ''}. Training on its samples would be off-policy in a "
            "way that nothing corrects; this is a fault of the engine or of its name map."
        )
    return proof


def sent_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, one at a time, so that at most one converted copy exists."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()
    yield from model.named_buffers(remove_duplicate=False)


def actor_fingerprints(model: nn.Module, dtype: torch.dtype) -> Mapping[str, str]:
    """Of every tensor as it is sent."""
    return {name: fingerprint(tensor) for name, tensor in sent_tensors(model, dtype)}


def compare_fingerprints(actor: Mapping[str, str], engine: Mapping[str, str], *, version: int) -> SyncProof:
    """By name; a name that one side lacks is a mismatch. Names come in the actor's order."""
    names = list(dict.fromkeys([*actor, *engine]))
    return SyncProof(
        weights_version=version,
        tensors=len(names),
        mismatched=tuple(name for name in names if actor.get(name) != engine.get(name)),
    )
