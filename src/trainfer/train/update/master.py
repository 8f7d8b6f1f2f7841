"""Master weights in one format, forward and backward in another, on one process.

Takes a model whose parameters are in the master format (float32) and the format to compute in; gives the
model to optimise and save (``master``) and the model to call (``compute``). Where both formats are one,
these are the same module. Otherwise ``compute`` is a rounded copy: every gradient is added up in the
master's format as soon as a backward has made it, so accumulation over micro-batches loses nothing, and
``refresh`` rounds the masters again after an optimizer step. Buffers keep their format: rotary
frequencies in bfloat16 would be another model.

It is what FSDP2's mixed precision does for several ranks; there ``sharded.ShardedWeights`` takes this class's place.
"""

import copy
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn


class TrainableWeights(Protocol):
    """A model that trains, as the trainer and the actor see it."""

    @property
    def master(self) -> nn.Module:
        """What is optimised and saved."""
        ...

    @property
    def compute(self) -> nn.Module:
        """What is called."""
        ...

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that an optimizer updates; tied ones once."""
        ...

    def prepare_backward(self, *, last: bool) -> None:
        """Called before each forward with a backward; ``last`` of its mini-batch or not."""
        ...

    def refresh(self) -> None:
        """Called after the masters have changed."""
        ...

    def rest(self) -> None:
        """Called after forwards without backward."""
        ...

    def move(self, device: torch.device) -> None:
        """Move the model; the parameters stay the same objects."""
        ...


class MasterWeights:
    """A model that trains and the model that computes for it."""

    def __init__(self, master: nn.Module, *, compute_dtype: torch.dtype) -> None:
        """Make the rounded copy if one is needed.

        Args:
            master: Parameters in the master format; owned from here on.
            compute_dtype: Format of forward and backward.
        """
        self.master = master
        self.compute = master
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        if all(parameter.dtype == compute_dtype for parameter in master.parameters()):
            return
        self.compute = copy.deepcopy(master)
        for parameter, copied in zip(master.parameters(), self.compute.parameters(), strict=True):
            copied.data = copied.data.to(compute_dtype)
            if copied.requires_grad:
                copied.register_post_accumulate_grad_hook(_accumulate_into(parameter))
                self._pairs.append((parameter, copied))  # what is frozen never changes

    def trainable(self) -> list[nn.Parameter]:
        """The master parameters that an optimizer updates; tied ones once."""
        return [parameter for parameter in self.master.parameters() if parameter.requires_grad]

    def prepare_backward(self, *, last: bool) -> None:
        """Nothing to do: there is nobody to meet."""

    def rest(self) -> None:
        """Nothing to do."""

    def move(self, device: torch.device) -> None:
        """Move both models."""
        self.master.to(device)
        self.compute.to(device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Let ``compute`` hold the masters' present values, rounded."""
        for parameter, copied in self._pairs:
            copied.copy_(parameter)


def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return accumulate
