"""Weights from actor to rollout engine, and the proof that they arrived.

Takes the actor's module, whole or sharded over ranks, and an engine; sends every parameter and buffer (those that no
checkpoint holds and tied names included) under its Transformers name, parameters in the format the engine computes in,
then compares the fingerprints of all of them with those that the engine reads from its own tensors afterwards: a
tensor that was skipped, rounded twice, left stale or is on one side only shows.

An adapted module (``train.update.adapter``) is sent as it is to an engine that computes with an adapter of its own, base
and adapter under PEFT's names: each is proven by itself. Other engines get one merged weight per adapted layer, ``W + s B A``
in float32 from the actor's own (master) values, rounded to the engine's format once.

Of a sharded module every rank sends whole tensors to its own engine. The actor's fingerprints come from the shards, not
from what was gathered (but for merged weights): partial sums of each rank, added up over the ranks. All ranks call every function together.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from trainfer.errors import WeightSyncError
from trainfer.exact.fingerprint import fingerprint_text, fingerprints, partial_fingerprint
from trainfer.train.update.adapter import AdapterLayout, adapted_layer, base_names, merge, part
from trainfer.workers.group import SyncProof
from trainfer.workers.rollout import RolloutWorker

SHOWN_NAMES = 5


def sync_weights(
    model: nn.Module,
    rollout: RolloutWorker,
    *,
    version: int,
    dtype: torch.dtype,
    merged: AdapterLayout | None = None,
) -> SyncProof:
    """Send the weights and insist on the proof of their arrival.

    Args:
        model: The actor's module.
        rollout: Gets the weights.
        version: Optimizer steps behind them.
        dtype: The engine's format of parameters.
        merged: The adapter of ``model``, where the engine gets merged weights.

    Raises:
        WeightSyncError: The engine refused the weights, or computes with others; names the first of them.
    """
    proof = send_weights(model, rollout, version=version, dtype=dtype, merged=merged)
    insist(proof)
    return proof


def send_weights(
    model: nn.Module,
    rollout: RolloutWorker,
    *,
    version: int,
    dtype: torch.dtype,
    merged: AdapterLayout | None = None,
) -> SyncProof:
    """As ``sync_weights``, but a failed proof is returned.

    Raises:
        WeightSyncError: The engine refused the weights.
    """
    if merged is None:
        sent, ours = sent_tensors(model, dtype), actor_fingerprints(model, dtype)
    else:
        sent, ours = merged_tensors(model, dtype, merged), merged_fingerprints(model, dtype, merged)
    rollout.load_weights(sent, version=version)
    return compare_fingerprints(ours, rollout.weight_fingerprints(), version=version)


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
        yield name, _whole(tensor)
    yield from model.named_buffers(remove_duplicate=False)


def merged_tensors(
    model: nn.Module, dtype: torch.dtype, adapter: AdapterLayout
) -> Iterator[tuple[str, Tensor]]:
    """As ``sent_tensors`` under the names of a model without adapter, adapted layers as one weight each."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for plain, name in base_names(named, adapter).items():
        layer = adapted_layer(plain, adapter)
        if layer is None:
            yield plain, _whole(_in_format(named[name], dtype))
        else:
            yield plain, _merged(named, name, layer, adapter).to(dtype)
    yield from model.named_buffers(remove_duplicate=False)


def merged_fingerprints(model: nn.Module, dtype: torch.dtype, adapter: AdapterLayout) -> Mapping[str, str]:
    """Of every tensor as it is sent merged: merged weights from what was gathered, all others as ``actor_fingerprints``."""
    named = dict(model.named_parameters(remove_duplicate=False))
    names = base_names(named, adapter)
    layers = {plain: layer for plain in names if (layer := adapted_layer(plain, adapter)) is not None}
    others = _fingerprints_of(
        [(plain, named[name]) for plain, name in names.items() if plain not in layers], dtype
    )
    merged = fingerprints(
        (plain, _merged(named, names[plain], layer, adapter).to(dtype)) for plain, layer in layers.items()
    )
    in_order = {plain: merged.get(plain) or others[plain] for plain in names}
    return in_order | fingerprints(model.named_buffers(remove_duplicate=False))


def actor_fingerprints(model: nn.Module, dtype: torch.dtype) -> Mapping[str, str]:
    """Of every tensor as it is sent; the same on every rank."""
    named = list(model.named_parameters(remove_duplicate=False))
    return _fingerprints_of(named, dtype) | fingerprints(model.named_buffers(remove_duplicate=False))


def _fingerprints_of(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """Of parameters in a format, in their order."""
    shards = {
        name: tensor
        for name, p in named
        if isinstance(p, DTensor) and isinstance(tensor := _in_format(p, dtype), DTensor)
    }
    whole = fingerprints((name, _in_format(p, dtype)) for name, p in named if name not in shards)
    whole |= _summed_over_ranks(shards)
    return {name: whole[name] for name, _ in named}


def base_fingerprints(model: nn.Module, adapter: AdapterLayout) -> Mapping[str, str]:
    """Of the frozen weights of an adapted model in their own format, under plain names; all ranks call it together."""
    named = dict(model.named_parameters())
    frozen = [(plain, named[name]) for plain, name in base_names(named, adapter).items()]
    return _fingerprints_of(frozen, frozen[0][1].dtype)


def compare_fingerprints(actor: Mapping[str, str], engine: Mapping[str, str], *, version: int) -> SyncProof:
    """By name; a name that one side lacks is a mismatch. Names come in the actor's order."""
    names = list(dict.fromkeys([*actor, *engine]))
    return SyncProof(
        weights_version=version,
        tensors=len(names),
        mismatched=tuple(name for name in names if actor.get(name) != engine.get(name)),
    )


def _merged(named: Mapping[str, Tensor], base: str, layer: str, adapter: AdapterLayout) -> Tensor:
    weight, a, b = (_whole(named[name].detach()) for name in (base, part(layer, "A"), part(layer, "B")))
    return merge(weight, a, b, adapter.scalings[layer])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
