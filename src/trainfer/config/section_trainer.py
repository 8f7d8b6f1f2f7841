"""The sections ``algorithm``, ``reward``, ``trainer`` and ``ray_kwargs``."""

from typing import Annotated, Literal

from msgspec import Meta, field

from trainfer.config.fields import Count, CountOrAll, NonNegative, Positive, Section, Text

LoggerName = Literal["console", "file", "tensorboard", "wandb", "trackio"]


class KlCtrlConfig(Section, frozen=True, kw_only=True):
    """The weight of the KL penalty inside the reward."""

    type: Annotated[
        Literal["fixed", "adaptive"], Meta(description="Keep kl_coef, or steer it towards target_kl.")
    ] = "fixed"
    kl_coef: Annotated[
        NonNegative, Meta(description="Weight of the KL penalty (first weight, if adaptive).")
    ] = 0.001
    horizon: Annotated[
        Count,
        Meta(
            description="Sequences over which the adaptive weight reacts: it changes by at most 0.2 times a step's sequences / horizon."
        ),
    ] = 10000
    target_kl: Annotated[
        Positive, Meta(description="Mean KL per token that the adaptive weight aims at.")
    ] = 0.1


class RolloutCorrectionConfig(Section, frozen=True, kw_only=True):
    """What is done about a rollout policy that differs from the trained one."""

    rollout_is: Annotated[
        Literal["token", "sequence"] | None,
        Meta(
            description="Importance weights old policy / rollout policy per token or per sequence. null: none."
        ),
    ] = None
    rollout_is_threshold: Annotated[
        Positive | Text,
        Meta(description='Upper bound of those weights, or "low_high": weights outside become 0.'),
    ] = 2.0
    rollout_is_batch_normalize: Annotated[
        bool, Meta(description="Divide the weights by their mean over the step.")
    ] = False
    bypass_mode: Annotated[
        bool,
        Meta(
            description="Take the rollout's log-probs as the old policy's and skip the old-log-prob forward."
        ),
    ] = False
    loss_type: Annotated[Literal["ppo_clip"], Meta(description="Loss in bypass mode.")] = "ppo_clip"


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Advantages, KL in the reward, and rollout correction."""

    adv_estimator: Annotated[
        Literal["grpo"], Meta(description="Advantage estimator: grpo (verl's default is gae).")
    ] = "grpo"
    norm_adv_by_std_in_grpo: Annotated[
        bool, Meta(description="Divide a group's advantages by its standard deviation; false is Dr.GRPO.")
    ] = True
    use_kl_in_reward: Annotated[
        bool, Meta(description="Subtract a KL penalty to the reference model from each token's reward.")
    ] = False
    kl_penalty: Annotated[
        Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"],
        Meta(description="Estimator of that penalty per token."),
    ] = "kl"
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


class RewardConfig(Section, frozen=True, kw_only=True):
    """Scoring responses; the scorer is chosen by each row's data_source."""

    num_workers: Annotated[
        Count,
        Meta(
            description="Processes that score responses in verl. trainfer scores in the driver: accepted, without effect."
        ),
    ] = 8


class TrainerConfig(Section, frozen=True, kw_only=True):
    """How long, where, and what is written when."""

    total_epochs: Annotated[Count, Meta(description="Passes over the training prompts.")] = 30
    total_training_steps: Annotated[
        Count | None, Meta(description="Steps after which training ends. null: total_epochs decides.")
    ] = None
    project_name: Annotated[
        Text, Meta(description="Groups runs in the run folder's name and in loggers.")
    ] = "trainfer"
    experiment_name: Annotated[
        Text, Meta(description="Names this run in the run folder's name and in loggers.")
    ] = "grpo"
    logger: Annotated[
        LoggerName | tuple[LoggerName, ...],
        Meta(
            description="Where metrics go, besides metrics.jsonl, which is always written: a name or a list."
        ),
    ] = ("console",)
    n_gpus_per_node: Annotated[
        Count,
        Meta(
            description="GPUs per node, one rank each; on CPU the number of worker processes. Default 1 (verl: 8)."
        ),
    ] = 1
    nnodes: Annotated[
        Count, Meta(description="Machines that take part, each with n_gpus_per_node ranks.")
    ] = 1
    save_freq: Annotated[
        CountOrAll,
        Meta(
            description="Steps between checkpoints; the last step saves too. -1: no checkpoint at all, as in verl."
        ),
    ] = -1
    test_freq: Annotated[
        CountOrAll,
        Meta(
            description="Steps between validations; the last step validates too. -1: none after the first step."
        ),
    ] = -1
    val_before_train: Annotated[bool, Meta(description="Validate once before the first step.")] = True
    val_only: Annotated[
        bool,
        Meta(
            description="Validate with the weights that the run would go on from, and stop; needs data.val_files and "
            "val_before_train."
        ),
    ] = False
    default_local_dir: Annotated[
        Text | None,
        Meta(description="Run folder. null: runs/<project_name>/<experiment_name>."),
    ] = None
    resume_mode: Annotated[
        Literal["auto", "disable", "resume_path"],
        Meta(
            description="auto: go on from the newest complete checkpoint of the run folder, if any; resume_path: from resume_from_path."
        ),
    ] = "auto"
    resume_from_path: Annotated[
        Text | None, Meta(description="A folder global_step_N to start from, with resume_mode=resume_path.")
    ] = None
    max_actor_ckpt_to_keep: Annotated[
        Count | None, Meta(description="Newest checkpoints that are kept. null: all.")
    ] = None
    critic_warmup: Annotated[Literal[0], Meta(description="Always 0: GRPO has no critic to warm up.")] = 0
    balance_batch: Annotated[
        bool, Meta(description="Give every rank about the same number of tokens; changes no gradient.")
    ] = True
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where ranks run. auto: cuda where there is a GPU (verl: cuda)."),
    ] = "auto"

    def __post_init__(self) -> None:
        """Fill in what follows another key."""
        if self.default_local_dir is None:
            self._resolve("default_local_dir", f"runs/{self.project_name}/{self.experiment_name}")
        if isinstance(self.logger, str):
            self._resolve("logger", (self.logger,))


class RuntimeEnvConfig(Section, frozen=True, kw_only=True):
    """Environment of every Ray process."""

    env_vars: Annotated[
        dict[str, str], Meta(description="Environment variables set in every Ray process.")
    ] = field(default_factory=dict[str, str])


class RayInitConfig(Section, frozen=True, kw_only=True):
    """Arguments of ray.init."""

    num_cpus: Annotated[
        Count | None, Meta(description="CPU cores that Ray may use on this node. null: all.")
    ] = None
    address: Annotated[
        Text | None, Meta(description="Ray cluster to join. null: the one of RAY_ADDRESS, else a local one.")
    ] = None
    runtime_env: RuntimeEnvConfig = RuntimeEnvConfig()


class RayKwargsConfig(Section, frozen=True, kw_only=True):
    """Ray, which is started for several processes or nodes only."""

    ray_init: RayInitConfig = RayInitConfig()
