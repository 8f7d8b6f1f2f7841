"""Puts a LoRA adapter of PEFT into a causal LM, in place, and switches it off for a while.

Takes a model of ``integrations.transformers.load`` and ``AdapterSettings``; the model keeps its class, its forward and
the names of everything that is not adapted, so trainer and engine run the same code with and without adapter. Only the
adapter's parameters train afterwards. What is no plain low-rank adapter of linear layers is refused, because no stage
behind this one could merge, prove or store it. Nothing is downloaded, no pickle is opened.

Dropout of an adapter is never applied, as that of the model is not: the policy that trains is the one that samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainfer.errors import ConfigError, ModelError
from trainfer.exact.linear import RoutedLinear, route_linears
from trainfer.train.update.adapter import ADAPTER_NAME, AdapterLayout, part

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in PEFT's files."""
_SHOWN = 5
_MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """Which adapter; names as verl's keys of ``actor_rollout_ref.model``."""

    rank: int
    """0 only with ``folder``."""
    alpha: float
    target_modules: str | tuple[str, ...]
    """``all-linear`` (all but the head), last parts of layer names, or one regular expression."""
    exclude_modules: str | tuple[str, ...] | None
    folder: Path | None
    """An adapter to start from; it decides rank, alpha and layers. None: A is drawn from ``seed`` and B is 0."""
    seed: int


def add_adapter(model: nn.Module, settings: AdapterSettings, *, base_folder: Path) -> AdapterLayout:
    """Adapt ``model`` in place; afterwards the adapter's parameters alone require a gradient.

    The adapter has the format of the layer that it adapts.

    Raises:
        ConfigError: the layers that were named are not there.
        ModelError: the adapter's folder cannot be used, or a layer cannot be adapted.
    """
    config = _config(settings)
    wanted = config.target_modules
    is_routed = any(type(module) is RoutedLinear for module in model.modules())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            inject_adapter_in_model(config, model)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{_MODEL}.target_modules={settings.target_modules!r}: PEFT cannot adapt such layers here ({_line(error)}). "
                "Name layers of the model by their last part, e.g. [q_proj,v_proj], or use all-linear."
            ) from error
    layers = _adapted(model)
    _check_named(wanted, layers)
    scalings = {name: float(layer.scaling[ADAPTER_NAME]) for name, layer in layers.items()}
    layout = AdapterLayout(
        scalings=scalings, config=_as_json(config, base_folder), base_folder=str(base_folder)
    )
    if settings.folder is not None:
        _load(model, layout, settings.folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in layout.parameter_names)
    if is_routed:
        route_linears(model)
    model.eval()
    return layout


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: each adapted layer calls the layer that it adapts and nothing else.

    Only for forwards without gradient. What requires a gradient stays as it is, also for parameters that are sharded
    and gathered meanwhile.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        _switch(layers, required, on=False)
        yield
    finally:
        _switch(layers, required, on=True)


def _switch(layers: Sequence[BaseTunerLayer], required: Sequence[nn.Parameter], *, on: bool) -> None:
    for layer in layers:
        layer.enable_adapters(on)
    for parameter in required:  # PEFT's switch is also one of training
        parameter.requires_grad_()


def _config(settings: AdapterSettings) -> LoraConfig:
    if settings.folder is not None:
        return _stored_config(settings)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  (PEFT divides it by r, whatever it is)
        target_modules=_list(settings.target_modules),
        exclude_modules=None if settings.exclude_modules is None else _list(settings.exclude_modules),
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    )


def _list(names: str | tuple[str, ...]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)


def _stored_config(settings: AdapterSettings) -> LoraConfig:
    assert settings.folder is not None
    path = settings.folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(
            f"{_MODEL}.lora_adapter_path={settings.folder} holds no {CONFIG_FILE}. Give a folder that PEFT's save_pretrained "
            "or `trainfer export --adapter` wrote."
        )
    try:
        config = PeftConfig.from_pretrained(str(settings.folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: PEFT refuses it: {_line(error)}") from error
    if not isinstance(config, LoraConfig):
        raise ModelError(
            f"{path}: is an adapter of the kind {config.peft_type}; only LoRA adapters are trained."
        )
    if config.modules_to_save or config.bias != "none":
        raise ModelError(
            f"{path}: also trains modules_to_save={config.modules_to_save} or bias={config.bias!r}; only adapters of linear "
            "layers alone are honoured."
        )
    if settings.rank not in (0, config.r):
        raise ConfigError(
            f"{_MODEL}.lora_rank={settings.rank}, but {path} has rank {config.r}. Leave lora_rank out: the adapter decides."
        )
    config.inference_mode = False
    return config


def _adapted(model: nn.Module) -> dict[str, Linear]:
    """Every adapted layer; raises for one that is more or less than ``W x + s B A x``."""
    tied = _parameters_by_identity(model)
    layers: dict[str, Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        problem = None
        if not isinstance(module, Linear) or not isinstance(base, nn.Linear):
            problem = f"is a {type(base).__name__}, and only torch.nn.Linear layers are adapted"
        elif module.lora_variant or any(module.lora_bias.values()) or module.fan_in_fan_out:
            problem = "would get a variant of LoRA (DoRA, a bias, a transposed weight), which is not honoured"
        elif len(tied[id(base.weight)]) > 1:
            problem = f"shares its weight with {', '.join(n for n in tied[id(base.weight)] if not n.startswith(name))}"
        if problem is not None:
            raise ModelError(f"{name} {problem}; leave it out of {_MODEL}.target_modules.")
        assert isinstance(module, Linear)
        layers[name] = module
    return layers


def _parameters_by_identity(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _check_named(wanted: object, layers: Mapping[str, nn.Module]) -> None:
    """PEFT passes over a name that matches nothing as long as another one matches."""
    if wanted is None or isinstance(wanted, str):
        return
    assert isinstance(wanted, (list, set, tuple))
    unknown = sorted(
        str(target)
        for target in wanted
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers)
    )
    if unknown:
        parts = sorted({layer.rpartition(".")[2] for layer in layers})
        raise ConfigError(
            f"{_MODEL}.target_modules names {', '.join(unknown[:_SHOWN])}, but no layer of the model is called so (adapted: "
            f"{', '.join(parts)}); correct or remove it."
        )


def _as_json(config: LoraConfig, base_folder: Path) -> dict[str, object]:
    """What PEFT's own ``save_pretrained`` would write, in an order that does not change from run to run."""
    values = config.to_dict()
    values["base_model_name_or_path"] = str(base_folder)
    values["inference_mode"] = True
    return json.loads(
        json.dumps(
            {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()},
            default=str,
        )
    )


@torch.no_grad()
def _load(model: nn.Module, layout: AdapterLayout, folder: Path) -> None:
    """Values of an adapter that PEFT wrote; every name must be there and no other."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(
            f"{path} is missing: adapters are read as safetensors only. PEFT writes them with save_pretrained(folder)."
        )
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged ({_line(error)}); copy or export the adapter again.") from error
    named = {file_name(layer, which): part(layer, which) for layer in layout.scalings for which in "AB"}
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    wrong = sorted(set(named) ^ set(stored)) or [
        name for name, own in named.items() if stored[name].shape != parameters[own].shape
    ]
    if wrong:
        raise ModelError(
            f"{path} does not fit {layout.base_folder}: {len(wrong)} tensor(s) are missing, strange or of another shape: "
            f"{', '.join(wrong[:_SHOWN])}. Give the model that the adapter was trained on."
        )
    for name, own in named.items():
        parameters[own].copy_(stored[name])


def file_name(layer: str, which: str) -> str:
    """The name of A or B of a layer in ``adapter_model.safetensors``."""
    return f"{PREFIX}{layer}.lora_{which}.weight"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
