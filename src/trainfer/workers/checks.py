"""What the workers cannot do for a legal configuration, told before anything is loaded.

Takes configuration and plan; raises one ``ConfigError`` with every problem, each a sentence with the remedy.
Keys that trainfer never honours are the configuration's own business; batch sizes are the planner's.
"""

from collections.abc import Iterator

from trainfer.config.schema import TrainConfig
from trainfer.errors import ConfigError
from trainfer.plan.records import StepPlan
from trainfer.train.update.correction import WeightBounds
from trainfer.workers.adapter import check_adapter


def check_honoured(config: TrainConfig, plan: StepPlan) -> None:
    """Raise for what a group of workers would have to ignore.

    Raises:
        ConfigError: every problem, one line each.
    """
    adapter = check_adapter(config)
    problems = [
        *_processes(config, plan),
        *_correction(config),
        *_sampling(config),
        *_reward(config),
        *([] if adapter is None else [adapter]),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _processes(config: TrainConfig, plan: StepPlan) -> Iterator[str]:
    trainer = config.trainer
    yield from _ranks(config, plan)
    if trainer.val_only and not (trainer.val_before_train and config.data.val_paths()):
        yield (
            "trainer.val_only=true validates before the first step and stops, so it needs data.val_files and "
            "trainer.val_before_train=true (verl would train); set them, or val_only=false."
        )
    actor, ref = config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config
    one = plan.num_ranks == 1
    if (
        one
        and trainer.device == "cuda"
        and (actor.param_offload or actor.optimizer_offload or ref.param_offload)
    ):
        yield (
            "fsdp_config.param_offload and .optimizer_offload need FSDP2's sharded workers; one process keeps everything on "
            "its GPU. Set them to false."
        )


def _ranks(config: TrainConfig, plan: StepPlan) -> Iterator[str]:
    if plan.num_ranks > 1 and config.actor_rollout_ref.rollout.name == "scripted":
        yield (
            f"actor_rollout_ref.rollout.name=scripted answers in the order of its file, which {plan.num_ranks} ranks do not have; "
            "set trainer.n_gpus_per_node=1 and trainer.nnodes=1."
        )


def _correction(config: TrainConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    name = "algorithm.rollout_correction"
    if correction.bypass_mode and correction.rollout_is is not None:
        yield (
            f"{name}.bypass_mode takes the rollout's log-probs as the old policy's, so every weight of "
            f"rollout_is={correction.rollout_is} would be 1; choose one of the two."
        )
    if correction.rollout_is is not None:
        try:
            WeightBounds.parse(correction.rollout_is_threshold)
        except ValueError:
            yield (
                f"{name}.rollout_is_threshold={correction.rollout_is_threshold!r} is neither a positive number nor an "
                'ascending pair such as "0.5_2.0".'
            )


def _sampling(config: TrainConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    filters = rollout.top_k != -1 or rollout.top_p != 1.0 or rollout.min_p != 0.0
    if config.algorithm.rollout_correction.bypass_mode and filters:
        yield (
            "algorithm.rollout_correction.bypass_mode with top_k, top_p or min_p: the rollout's log-probs are those of the "
            "filtered distribution and the loss's are not, so their ratio is not that of two policies; sample without "
            "filters or leave bypass_mode out."
        )
    if rollout.name == "scripted" and config.trainfer.scripted_responses is None:
        yield (
            "actor_rollout_ref.rollout.name=scripted answers from a file; set trainfer.scripted_responses, or "
            "use rollout.name=builtin."
        )


def _reward(config: TrainConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if config.actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "actor.use_kl_loss and algorithm.use_kl_in_reward both hold the policy near the ref, twice over; choose one "
            "(verl lets both pass with a notice)."
        )
