"""Gradients, through hooks on tensors.

Takes tensors of a forward and the model's parameters; gives their gradients to the sink when autograd has them.
A tensor hook adds no node to the graph and changes no order of accumulation, unlike a module's full backward
hook: gradients stay bit-identical. A tensor that stands in several places is hooked once.
"""
# pyright: standard
# (torch's hook types are partial)

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainfer.check.dump.records import NO_CALL, Role
from trainfer.check.probe.call import ForwardCall, Place
from trainfer.check.probe.sink import TensorSink

GRADIENT_OF = {Role.INPUT: Role.INPUT_GRADIENT, Role.OUTPUT: Role.OUTPUT_GRADIENT}


class GradientHooks:
    """Hooks of one capture."""

    def __init__(self, sink: TensorSink) -> None:
        self._sink = sink
        self._places: dict[int, tuple[weakref.ref[Tensor], list[tuple[Place, bool]]]] = {}
        self._handles: list[RemovableHandle] = []
        self.open = True

    def watch(self, call: ForwardCall, place: Place, tensor: Tensor, *, head: bool) -> None:
        """Record the tensor's gradient when it comes; through all its uses."""
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return
        place = Place(place.module, place.occurrence, place.function, GRADIENT_OF[place.role], place.name)
        known = self._places.get(id(tensor))
        if known is not None and known[0]() is tensor:
            known[1].append((place, head))
            return
        places = [(place, head)]
        self._places[id(tensor)] = (weakref.ref(tensor), places)
        try:
            tensor.register_hook(self._deliver(call, places))
        except RuntimeError as error:
            self._sink.problem(
                f"the gradient of {place.name} cannot be watched: {error}", module=place.module
            )

    def end_call(self) -> None:
        """Forget the tensors of the call; their hooks stay with them."""
        self._places.clear()

    def watch_parameters(
        self, parameters: dict[str, tuple[str, str, nn.Parameter]], state: Callable[[], ForwardCall]
    ) -> None:
        """Record ``.grad`` whenever autograd has added to it; ``state`` tells step, pass and version then."""
        for module, local, parameter in parameters.values():
            if parameter.requires_grad:
                hook = self._deliver_parameter(module, local, state)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Remove what can be removed and silence the rest."""
        self.open = False
        for handle in self._handles:
            handle.remove()

    def _deliver(self, call: ForwardCall, places: list[tuple[Place, bool]]) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.open:
                for place, head in places:
                    self._sink.record(call, place, gradient, head=head)

        return hook

    def _deliver_parameter(
        self, module: str, local: str, state: Callable[[], ForwardCall]
    ) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            call = state()
            if not self.open or not call.recorded or parameter.grad is None:
                return
            occurrence = call.occurrence(f"{module}.{local}")
            place = Place(module, occurrence, None, Role.PARAMETER_GRADIENT, local)
            assert call.number == NO_CALL
            self._sink.record(call, place, parameter.grad)
            self._sink.end_backward()

        return hook
