"""How a model calls its modules: what each takes and gives, learned from one short run.

Takes a model; gives for each module the arguments of its first call and the structure of its result, with tiny
tensors in them. The replay puts a side's captured rows in the place of those tensors. The model runs once, on a few
tokens, without gradients; its training flags and random state are as before.
"""
# pyright: standard
# (torch's own types are partial)

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from trainfer.check.align.names import NameMap, canonical
from trainfer.check.probe.leaves import KeyValueCache, argument_leaves, tensor_leaves
from trainfer.check.probe.names import named_modules

TOKENS = 11
"""Of the short run: a prime that no width is likely to be."""

Dims = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One tensor among a module's arguments or results."""

    name: str
    """As the probe names it: ``0``, ``hidden_states``, ``position_embeddings.1``."""
    argument: str
    """The same with the parameter's own name in the place of its number: ``hidden_states``; of results the name."""
    is_float: bool
    shape: tuple[int, ...]
    dims: Dims | None
    """Dimensions that run over tokens; None where none does."""
    offset: int | None = None
    """The whole numbers are positions with so much added (GPT-2's ``wpe``: 0, OPT's: 2); None where they are not."""

    @property
    def width(self) -> int:
        """Features of a row."""
        size = 1
        for dim, length in enumerate(self.shape):
            size *= 1 if self.dims is not None and dim in self.dims else length
        return size

    @property
    def has_rows_alone(self) -> bool:
        """Its width does not grow with the tokens, as that of attention weights does."""
        return self.dims is not None and self.shape.count(TOKENS) == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTemplate:
    """One module's call."""

    args: tuple[object, ...]
    """Those that have no name."""
    kwargs: Mapping[str, object]
    output: object
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    accepts: tuple[str, ...]
    """Names of the forward's own parameters, in order."""
    runs: int = 1
    """How often it ran in the one call."""


def learn_calls(model: nn.Module, names: NameMap) -> dict[str, CallTemplate]:
    """Canonical module name -> its call; modules that did not run are missing.

    Raises:
        Exception: whatever the model raises on a few token ids; the caller reports it.
    """
    found: dict[str, CallTemplate] = {}
    handles = [
        module.register_forward_hook(_recorder(found, canonical(name, names)), with_kwargs=True)
        for name, module in named_modules(model).items()
    ]
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _run_shortly(model)
    finally:
        for handle in handles:
            handle.remove()
        for module, flag in training.items():
            module.training = flag
    return found


def _run_shortly(model: nn.Module) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.arange(1, 3 * TOKENS, 3, device=device)[None] % _vocabulary(
        model
    )  # not to be taken for positions
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        model(ids)
    elif "use_cache" in accepted:
        model(input_ids=ids, use_cache=False)
    else:
        model(input_ids=ids)


def _vocabulary(model: nn.Module) -> int:
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(sizes, default=TOKENS + 1)


def _recorder(found: dict[str, CallTemplate], name: str) -> Callable[..., None]:
    def record(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        if name in found:
            found[name] = dataclasses.replace(found[name], runs=found[name].runs + 1)
            return
        accepts = tuple(inspect.signature(module.forward).parameters)
        named = _named_places(module, args)
        given = {named[place]: value for place, value in enumerate(args) if place in named} | kwargs
        found[name] = CallTemplate(
            args=args[len(named) :],
            kwargs={key: value for key, value in given.items() if not isinstance(value, KeyValueCache)},
            output=output,
            inputs=_leaves(list(argument_leaves(args, kwargs, [])), named),
            outputs=_leaves(list(tensor_leaves(output, "0", [])), {}),
            accepts=accepts,
        )

    return record


def _named_places(module: nn.Module, args: Sequence[object]) -> dict[int, str]:
    """Number of a positional argument -> the parameter's name; empty where the forward takes ``*args``."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    plain = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return dict(enumerate(plain[: len(args)])) if len(plain) >= len(args) else {}


def _argument(name: str, named: Mapping[int, str]) -> str:
    first, dot, rest = name.partition(".")
    known = named.get(int(first)) if first.isdigit() else None
    return name if known is None else known + dot + rest


def _leaves(tensors: Sequence[tuple[str, Tensor]], named: Mapping[int, str]) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(
            name=name,
            argument=_argument(name, named),
            is_float=tensor.is_floating_point(),
            shape=tuple(tensor.shape),
            dims=token_dims(tensor.shape),
            offset=_offset(tensor),
        )
        for name, tensor in tensors
    )


def _offset(tensor: Tensor) -> int | None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() != TOKENS:
        return None
    added = tensor.reshape(-1).long() - torch.arange(TOKENS, device=tensor.device)
    return int(added[0]) if bool((added == added[0]).all()) else None


def token_dims(shape: Sequence[int]) -> Dims | None:
    """Dimensions of a tensor of the short run that run over its tokens. Example: ``[1, 4, 11, 8]`` gives (0, 2)."""
    if len(shape) > 1 and shape[0] == 1 and shape[1] == TOKENS:
        return (0, 1)
    if len(shape) == 4 and shape[0] == 1 and shape[2] == TOKENS:
        return (0, 2)
    if shape and shape[0] == TOKENS:
        return (0,)
    return None


def place_rows(rows: Tensor, leaf: Leaf) -> Tensor:
    """Rows ``[n, width]`` in the shape that a module takes or gives for n tokens."""
    assert leaf.dims is not None, "only tensors with rows are filled"
    rest = [size for dim, size in enumerate(leaf.shape) if dim not in leaf.dims]
    shaped = rows.reshape(len(rows), *rest)
    if leaf.dims == (0, 2):
        return shaped.transpose(0, 1)[None]
    return shaped[None] if leaf.dims == (0, 1) else shaped


def filled(value: object, tensors: Mapping[str, Tensor | None], name: str, depth: int = 0) -> object:
    """A value with the tensors of that name replaced; nesting is named as by the probe."""
    if isinstance(value, Tensor):
        return tensors.get(name)
    if isinstance(value, str | nn.Module) or value is None:
        return value
    prefix = f"{name}." if depth else ""
    if isinstance(value, Mapping):
        changed = copy.copy(cast("dict[object, object]", value))
        for key, item in list(changed.items()):
            changed[key] = filled(item, tensors, f"{prefix}{key}", depth + 1)
        return changed
    if isinstance(value, tuple | list):
        items = [filled(item, tensors, f"{prefix}{place}", depth + 1) for place, item in enumerate(value)]
        make = getattr(type(value), "_make", type(value))
        return make(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: filled(getattr(value, field.name), tensors, f"{prefix}{field.name}", depth + 1)
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changes)
    return value
