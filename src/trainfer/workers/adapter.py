"""Which adapter a run trains, from the configuration, and the base that it belongs to.

Takes ``actor_rollout_ref.model``; gives ``AdapterSettings`` for ``integrations.peft`` and the fingerprints of a model's
frozen weights, by which a stored adapter knows its base. PEFT is imported by ``adapt`` alone.
"""

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from trainfer.config.schema import TrainConfig
from trainfer.errors import ConfigError
from trainfer.train.update.adapter import AdapterLayout


def check_adapter(config: TrainConfig) -> str | None:
    """What stands against the adapter that is asked for, as a sentence; None where nothing does."""
    model = config.actor_rollout_ref.model
    if not model.trains_adapter:
        return None
    if importlib.util.find_spec("peft") is None:
        return (
            f"actor_rollout_ref.model.lora_rank={model.lora_rank} trains an adapter with PEFT, which is not installed: "
            "pip install 'trainfer[lora]', or set lora_rank=0 to train all weights."
        )
    if model.lora_adapter_path is not None and not Path(model.lora_adapter_path).is_dir():
        return (
            f"actor_rollout_ref.model.lora_adapter_path={model.lora_adapter_path} is no folder; give one that PEFT's "
            "save_pretrained wrote, or leave the key out for a new adapter."
        )
    return None


def adapt(model: nn.Module, config: TrainConfig, base_folder: Path) -> AdapterLayout | None:
    """Put the run's adapter into ``model``; None where all weights train.

    Raises:
        ConfigError: PEFT is not installed, or the layers that were named are not there. ModelError: see ``add_adapter``.
    """
    settings = config.actor_rollout_ref.model
    if not settings.trains_adapter:
        return None
    problem = check_adapter(config)
    if problem is not None:
        raise ConfigError(problem)
    from trainfer.integrations.peft.adapter import AdapterSettings, add_adapter

    wanted = AdapterSettings(
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        target_modules=settings.target_modules,
        exclude_modules=settings.exclude_modules,
        folder=None if settings.lora_adapter_path is None else Path(settings.lora_adapter_path),
        seed=config.trainfer.seed,
    )
    return add_adapter(model, wanted, base_folder=base_folder)


def without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, an adapted model is its base; see ``integrations.peft.adapter.adapter_disabled``."""
    from trainfer.integrations.peft.adapter import adapter_disabled

    return adapter_disabled(model)
