"""A module and its optimizer as one flat mapping of named tensors, and back.

``model.<parameter or persistent buffer>`` under Transformers' names (wrappers of torch.compile and activation
checkpointing taken out), ``optimizer.<parameter>.<state>``, e.g. ``optimizer.lm_head.weight.exp_avg``.
Tied parameters appear once, under the first name. Nothing is copied: the mapping holds the live tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainfer.errors import CheckpointError
from trainfer.train.update.checkpoint_tensors import StoredTensor

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed on this machine: they follow the optimizer, not the checkpoint."""

Scalar = int | float | str | bool


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once; tied ones under their first name."""
    return {_clean(name): parameter for name, parameter in model.named_parameters()}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers."""
    tensors: dict[str, Tensor] = dict(parameters_by_name(model))
    every_name = {_clean(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if _clean(name) not in every_name and isinstance(value, Tensor):
            tensors[_clean(name)] = value
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State tensors of every parameter that has been stepped."""
    return {
        f"{OPTIMIZER_PREFIX}{name}.{key}": value
        for name, parameter in parameters_by_name(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def optimizer_scalars(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, dict[str, Scalar]], list[dict[str, object]]]:
    """(state that is no tensor, by parameter; options of each group with its parameters' names)."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters_by_name(model).items()}
    scalars: dict[str, dict[str, Scalar]] = {}
    for parameter, state in optimizer.state.items():
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if plain:
            scalars[names[parameter]] = plain
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "options": {
                key: value for key, value in group.items() if key != "params" and key not in _IMPLEMENTATION
            },
        }
        for group in optimizer.param_groups
    ]
    return scalars, groups


def prepare_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tensors: Mapping[str, StoredTensor],
    scalars: Mapping[str, Mapping[str, Scalar]],
    groups: list[dict],
) -> dict[str, Tensor]:
    """Give the optimizer the stored options and empty state of the stored shapes; return that state to be filled.

    A state of its parameter's shape is placed and sharded like the parameter.

    Raises:
        CheckpointError: the stored groups or states are not those of this model.
    """
    parameters = parameters_by_name(model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    present = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if present != [group.get("parameters") for group in groups]:
        raise CheckpointError(
            "The checkpoint's optimizer groups hold other parameters than this optimizer's. "
            "Resume with the configuration that was saved."
        )
    optimizer.state.clear()
    on_device = {}
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for key, value in stored["options"].items():
            group[key] = tuple(value) if isinstance(value, list) else value
        for parameter in group["params"]:
            on_device[parameter] = bool(group.get("fused") or group.get("capturable"))
    for name, plain in scalars.items():
        optimizer.state[parameters[name]].update(plain)
    filled: dict[str, Tensor] = {}
    for full_name, entry in tensors.items():
        name, _, key = full_name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
        if name not in parameters:
            raise CheckpointError(f"The checkpoint holds {full_name}, but the model has no parameter {name}.")
        parameter = parameters[name]
        if entry.shape == tuple(parameter.shape) and key != "step":
            value = torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
        else:
            device = parameter.device if on_device[parameter] else torch.device("cpu")
            value = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        optimizer.state[parameter][key] = value
        filled[full_name] = value
    return filled


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
