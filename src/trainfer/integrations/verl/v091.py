"""What is hooked in verl 0.9.1, with its V1 trainer and with the older one (``trainer.use_v1=false``).

Both run the same engine workers and vLLM servers, so one table serves both. Data only.
"""

from trainfer.integrations.verl.points import Point, Table

_TRAIN = "trainfer.integrations.verl.v091_train"
_ROLLOUT = "trainfer.integrations.verl.v091_rollout"
_WORKERS = "verl.workers.engine_workers"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"

TABLE = Table(
    version="0.9.1",
    vllm=("0.24", "0.30", "0.32"),
    has_plugins=True,
    points=(
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.compute_log_prob",
            advice=f"{_TRAIN}:old_log_prob",
            what="the pass old_log_prob",
        ),
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.compute_ref_log_prob",
            advice=f"{_TRAIN}:ref_log_prob",
            what="the pass ref_log_prob",
        ),
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.update_actor",
            advice=f"{_TRAIN}:update",
            what="the pass update",
        ),
        Point(
            module=_WORKERS,
            name="ActorRolloutRefWorker.update_weights",
            advice=f"{_TRAIN}:weights_sent",
            what="the sync of weights, on the trainer's side",
        ),
        Point(
            module=_ENGINE,
            name="FSDPEngineWithLMHead.prepare_model_inputs",
            advice=f"{_TRAIN}:micro_batch_inputs",
            what="the rows of each micro-batch",
        ),
        Point(
            module=_ENGINE,
            name="FSDPEngineWithLMHead.forward_step",
            advice=f"{_TRAIN}:micro_batch",
            what="the sequences and log-probs of each micro-batch",
        ),
        Point(
            module=_ENGINE,
            name="FSDPEngine.optimizer_step",
            advice="trainfer.integrations.verl.v091_prompts:optimizer_step",
            what="the optimizer step, skipped where only prompts are trained on",
        ),
        Point(
            module=_SERVER,
            name="vLLMHttpServer.launch_server",
            advice=f"{_ROLLOUT}:launched",
            what="which engine a process belongs to",
        ),
        Point(
            module=_SERVER,
            name="vLLMHttpServer.generate",
            advice=f"{_ROLLOUT}:generated",
            what="sampled token ids, their log-probs and how they were sampled",
        ),
        Point(
            module=_SERVER,
            name="vLLMHttpServer.set_global_steps",
            advice=f"{_ROLLOUT}:weights_version",
            what="the weights version of what is sampled",
        ),
        Point(
            module="verl.workers.rollout.vllm_rollout.utils",
            name="vLLMColocateWorkerExtension.update_weights_from_ipc",
            advice=f"{_ROLLOUT}:weights_received",
            what="the sync of weights, in vLLM's worker",
        ),
    ),
)
