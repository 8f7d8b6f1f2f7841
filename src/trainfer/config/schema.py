"""Every key that ``trainfer train`` honours, as frozen records under verl's key names.

Takes nothing; gives ``TrainConfig`` and its sections, one field a key, each with a description that says
what it counts and per what. Keys whose default follows another key are filled in at construction, so a
``TrainConfig`` never holds a null that means "look elsewhere".

Leaves out reading files (``load``), verl's keys that are not honoured (``unsupported``), and batch
arithmetic (the planner).
"""

import msgspec

from trainfer.config.fields import Section
from trainfer.config.section_actor import (
    ActorConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RefFsdpConfig,
)
from trainfer.config.section_data import DataConfig
from trainfer.config.section_rollout import AgentConfig, RolloutConfig, ValKwargsConfig
from trainfer.config.section_trainer import (
    AlgorithmConfig,
    KlCtrlConfig,
    RayInitConfig,
    RayKwargsConfig,
    RewardConfig,
    RolloutCorrectionConfig,
    RuntimeEnvConfig,
    TrainerConfig,
)
from trainfer.config.section_trainfer import (
    BuiltinEngineConfig,
    ConsistencyConfig,
    TrainferConfig,
    WarmupConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "BuiltinEngineConfig",
    "ConsistencyConfig",
    "DataConfig",
    "FsdpConfig",
    "KlCtrlConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OptimConfig",
    "RayInitConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RefFsdpConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RuntimeEnvConfig",
    "TrainConfig",
    "TrainerConfig",
    "TrainferConfig",
    "ValKwargsConfig",
    "WarmupConfig",
]


class ActorRolloutRefConfig(Section, frozen=True, kw_only=True):
    """The model, its training (actor), its sampling (rollout) and its frozen copy (ref)."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()

    def __post_init__(self) -> None:
        """Let the token budgets of log-prob forwards follow the actor's."""
        budget = self.actor.ppo_max_token_len_per_gpu
        if self.rollout.log_prob_max_token_len_per_gpu is None:
            self._resolve(
                "rollout", msgspec.structs.replace(self.rollout, log_prob_max_token_len_per_gpu=budget)
            )
        if self.ref.log_prob_max_token_len_per_gpu is None:
            self._resolve("ref", msgspec.structs.replace(self.ref, log_prob_max_token_len_per_gpu=budget))


class TrainConfig(Section, frozen=True, kw_only=True):
    """The whole configuration of a training run."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    trainfer: TrainferConfig = TrainferConfig()
    ray_kwargs: RayKwargsConfig = RayKwargsConfig()

    def __post_init__(self) -> None:
        """Let the seeds that were not given follow ``trainfer.seed``."""
        if self.data.seed is None:
            self._resolve("data", msgspec.structs.replace(self.data, seed=self.trainfer.seed))
        warmup = self.trainfer.warmup
        if warmup is not None and warmup.seed is None:
            seeded = msgspec.structs.replace(warmup, seed=self.trainfer.seed)
            self._resolve("trainfer", msgspec.structs.replace(self.trainfer, warmup=seeded))
