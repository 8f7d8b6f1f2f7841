"""What is hooked in verl 0.6.1: the FSDP worker path, with vLLM in the worker's process (``rollout.mode`` sync and async).

One process holds the trainer and vLLM's worker in both modes; in async mode requests come to it over a socket. Data only.
"""

from trainfer.integrations.verl.points import Point, Table

_TRAIN = "trainfer.integrations.verl.v061_train"
_ROLLOUT = "trainfer.integrations.verl.v061_rollout"
_WORKERS = "verl.workers.fsdp_workers"
_ACTOR = "verl.workers.actor.dp_actor"
_SPMD = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd"

TABLE = Table(
    version="0.6.1",
    vllm=("0.11",),
    has_plugins=False,
    points=(
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.compute_log_prob",
            advice=f"{_TRAIN}:worker_log_prob",
            what="whether log-probs are asked of the actor or of its base without adapter",
        ),
        Point(
            module=_ACTOR,
            name="DataParallelPPOActor.compute_log_prob",
            advice=f"{_TRAIN}:log_prob",
            what="the passes old_log_prob and ref_log_prob",
        ),
        Point(
            module=_ACTOR,
            name="DataParallelPPOActor.update_policy",
            advice=f"{_TRAIN}:update",
            what="the pass update",
        ),
        Point(
            module=_ACTOR,
            name="DataParallelPPOActor._forward_micro_batch",
            advice=f"{_TRAIN}:micro_batch",
            what="the rows, sequences and log-probs of each micro-batch",
        ),
        Point(
            module=_ACTOR,
            name="DataParallelPPOActor._optimizer_step",
            advice="trainfer.integrations.verl.v061_prompts:optimizer_step",
            what="the optimizer step, skipped where only prompts are trained on",
        ),
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.generate_sequences",
            advice=f"{_ROLLOUT}:generate",
            what="whether a generation is a validation's (mode sync)",
        ),
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.rollout_mode",
            advice=f"{_ROLLOUT}:rollout_mode",
            what="the sync of weights, after which the rollout is captured",
        ),
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.trainer_mode",
            advice=f"{_ROLLOUT}:trainer_mode",
            what="the end of the rollout",
        ),
        Point(
            module=_SPMD,
            name="vLLMRollout.update_weights",
            advice=f"{_ROLLOUT}:weights_sent",
            what="the weights that are sent (mode sync)",
        ),
        Point(
            module=_SPMD,
            name="vLLMAsyncRollout.update_weights",
            advice=f"{_ROLLOUT}:weights_sent",
            what="the weights that are sent (mode async)",
        ),
        Point(
            module="verl.trainer.ppo.ray_trainer",
            name="RayPPOTrainer._validate",
            advice=f"{_ROLLOUT}:validate",
            what="which generations are a validation's (mode async)",
        ),
    ),
)
