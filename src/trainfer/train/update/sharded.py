"""A model whose parameters are sharded over ranks by FSDP2: what ``master.MasterWeights`` is on one rank.

Takes a whole model on every rank, its layers and a mesh; leaves each rank its share of every parameter, in the master
format. Layers gather their parameters in the compute format for forward and backward; gradients are summed over all
ranks in the reduce format (summed, not averaged: each rank's loss is divided by the totals of the whole mini-batch
already). Over several micro-batches a rank adds its gradients up by itself and communicates once, in the last backward.

Every rank must make the same forwards and backwards in the same order. Leaves out who gets which sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a model is spread over ranks."""

    mesh: DeviceMesh
    """``(fsdp,)``, or ``(ddp, fsdp)``: shards within fsdp, replicas along ddp."""
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool = True
    """False keeps gathered parameters between forward and backward and from micro-batch to micro-batch."""


class ShardedWeights:
    """A sharded model that trains, or one that only scores where nothing of it requires a gradient."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], sharding: Sharding) -> None:
        """Shard ``model`` in place, a group of parameters per layer and one for the rest.

        Args:
            model: Parameters in the master format, equal on every rank; each layer moves to the mesh's device as it
                is sharded, so the whole model is never there.
            layers: Modules of ``model`` whose parameters are gathered together; run one after the other.
            sharding: How.
        """
        policy = MixedPrecisionPolicy(
            param_dtype=sharding.compute_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
        )
        for module in (*layers, model):
            fully_shard(
                module,
                mesh=sharding.mesh,
                mp_policy=policy,
                reshard_after_forward=sharding.reshard_after_forward,
            )
        self.master = model
        self.compute = model
        self._keeps_gathered = not sharding.reshard_after_forward
        self._groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for group in self._groups:
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)

    def trainable(self) -> list[nn.Parameter]:
        """The sharded parameters that an optimizer updates; tied ones once."""
        return [parameter for parameter in self.master.parameters() if parameter.requires_grad]

    def prepare_backward(self, *, last: bool) -> None:
        """Called before each forward with a backward; ``last`` of the mini-batch is the one that communicates."""
        for group in self._groups:
            group.set_requires_gradient_sync(last, recurse=False)
            group.set_reshard_after_backward(last or not self._keeps_gathered, recurse=False)

    def refresh(self) -> None:
        """Nothing to do: parameters are gathered anew after an optimizer step."""

    def rest(self) -> None:
        """Give gathered parameters free; ``master.parameters()`` are then the shards. Call it after forwards without backward."""
        for group in self._groups:
            group.reshard()

    def move(self, device: torch.device) -> None:
        """Move shards and buffers; the parameters stay the same objects for an optimizer."""
        self.master.to(device)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move every state tensor of more than one value."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[key] = value.to(device)
