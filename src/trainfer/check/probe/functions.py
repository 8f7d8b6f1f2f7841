"""Functions (level L1): what torch was asked to compute, whoever asked.

A torch-function mode, switched on while the root module runs; gives the inputs and outputs of every function
that makes a new tensor. Views, shapes and attributes are passed over by rule: an output that shares an input's
storage, unchanged, is no result. The innermost running module is the one that asked.
"""
# pyright: standard
# (a mode receives whatever torch is called with)

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from trainfer.check.dump.records import Role
from trainfer.check.probe.leaves import argument_leaves, tensor_leaves

Before = list[tuple[str, Tensor, tuple[int, int]]]
Deliver = Callable[[str, Role, str, Tensor, int], None]


class FunctionWatcher(TorchFunctionMode):
    """Reports every function to ``begin`` (gives its occurrence, or None to pass it over) and ``deliver``."""

    def __init__(self, begin: Callable[[str], int | None], deliver: Deliver) -> None:
        super().__init__()
        self._begin = begin
        self._deliver = deliver
        self._names: dict[object, str | None] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the function as it would have run, and report it."""
        kwargs = kwargs or {}
        name = self._name(func)
        if name is None:
            return func(*args, **kwargs)
        inputs = [(where, t, _identity(t)) for where, t in argument_leaves(args, kwargs, [])]
        keep_inputs = self._before(inputs) if name.endswith("_") or "out" in kwargs else inputs
        result = func(*args, **kwargs)
        outputs = list(tensor_leaves(result, "0", []))
        known = {identity for _, _, identity in inputs}
        if not any(_identity(tensor) not in known for _, tensor in outputs):
            return result
        occurrence = self._begin(name)
        if occurrence is not None:
            for where, tensor, _ in keep_inputs:
                self._deliver(name, Role.INPUT, where, tensor, occurrence)
            for where, tensor in outputs:
                self._deliver(name, Role.OUTPUT, where, tensor, occurrence)
        return result

    def _before(self, inputs: Before) -> Before:
        """Copies of inputs that the function is about to overwrite."""
        with torch.no_grad():
            return [(where, tensor.detach().clone(), identity) for where, tensor, identity in inputs]

    def _name(self, func: Callable[..., object]) -> str | None:
        """Name of a function; None for attributes and whatever has none."""
        if func not in self._names:
            name = resolve_name(func)
            hidden = name is None or name.endswith(("__get__", "__set__"))
            self._names[func] = None if hidden else name
        return self._names[func]


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Storage and version: equal for a view of an unchanged tensor."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return (id(tensor), 0)
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.untyped_storage()._cdata, version)
