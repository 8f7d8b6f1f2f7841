"""Which ranks shard together and which share sequences: device meshes over all ranks.

Takes the sizes of a plan; gives the mesh that FSDP2 shards over, ``(fsdp,)`` or ``(ddp, fsdp)``, and this rank's place
in its sequence-parallel group, from the mesh ``(dp, sp)``. Both meshes cover all ranks: neighbours in sp hold the same
sequences and different rows, and their gradients are summed like all others.

Example: 4 ranks, fsdp_size 2, sequence-parallel size 2: shards {0, 1} and {2, 3}, replicas {0, 2} and {1, 3};
ranks 0 and 1 share sequences, 2 and 3 share others.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainfer.exact.ulysses import SequenceShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """One rank's view."""

    fsdp: DeviceMesh
    sequence: SequenceShard | None
    """None where every rank has its sequences to itself."""


def make_meshes(device_type: str, *, num_ranks: int, fsdp_size: int, sequence_parallel_size: int) -> Meshes:
    """Meshes of the process group that is running; every rank calls it.

    Args:
        device_type: ``cpu`` or ``cuda``.
        num_ranks: Of the process group.
        fsdp_size: Ranks per shard group; -1, or as many as there are and more, is one group. Else it divides the ranks.
        sequence_parallel_size: Ranks that share a sequence. Divides the ranks.
    """
    if fsdp_size == -1 or fsdp_size >= num_ranks:
        fsdp = init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("fsdp",))
    else:
        fsdp = init_device_mesh(
            device_type, (num_ranks // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp")
        )
    if sequence_parallel_size == 1:
        return Meshes(fsdp=fsdp, sequence=None)
    sequences = init_device_mesh(
        device_type,
        (num_ranks // sequence_parallel_size, sequence_parallel_size),
        mesh_dim_names=("dp", "sp"),
    )
    shard = SequenceShard(
        group=sequences.get_group("sp"), rank=sequences.get_local_rank("sp"), size=sequence_parallel_size
    )
    return Meshes(fsdp=fsdp, sequence=shard)
