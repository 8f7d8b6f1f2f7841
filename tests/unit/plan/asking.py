"""Questions for tests: overrides as a user types them, and the short names of verl-facts' symbols."""

from trainfer.config.overrides import parse_overrides
from trainfer.plan.analyse import analyse
from trainfer.plan.question import Entry, Question

SHORT = {
    "T": "data.train_batch_size",
    "gen": "+data.gen_batch_size",
    "Lp": "data.max_prompt_length",
    "Lr": "data.max_response_length",
    "M": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "m": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "m_all": "actor_rollout_ref.actor.ppo_micro_batch_size",
    "dynamic": "actor_rollout_ref.actor.use_dynamic_bsz",
    "tokens": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "E": "actor_rollout_ref.actor.ppo_epochs",
    "agg": "actor_rollout_ref.actor.loss_agg_mode",
    "kl": "actor_rollout_ref.actor.use_kl_loss",
    "SP": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "fsdp": "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "strategy": "actor_rollout_ref.actor.strategy",
    "packed": "actor_rollout_ref.model.use_remove_padding",
    "lora": "actor_rollout_ref.model.lora_rank",
    "n": "actor_rollout_ref.rollout.n",
    "name": "actor_rollout_ref.rollout.name",
    "mode": "actor_rollout_ref.rollout.mode",
    "TP": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "workers": "actor_rollout_ref.rollout.agent.num_workers",
    "L": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "L_all": "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "L_dynamic": "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "L_tokens": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "Lref": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "Lref_all": "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "G": "trainer.n_gpus_per_node",
    "nodes": "trainer.nnodes",
    "balance": "trainer.balance_batch",
    "v1": "trainer.use_v1",
    "trainer_mode": "trainer.v1.trainer_mode",
    "sync_step": "trainer.v1.separate_async.parameter_sync_step",
    "adv": "algorithm.adv_estimator",
}


def overrides_of(**short):
    short.setdefault("adv", "grpo")
    texts = []
    for name, value in short.items():
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        texts.append(f"{SHORT[name]}={text}")
    return texts


def question(texts, **more):
    entries = tuple(Entry.of(override, source="override") for override in parse_overrides(texts))
    return Question(entries=entries, **more)


def plan(rules, *texts, **short):
    """Plan under a rule set; for trainfer too, where the default engine has no tensor parallelism."""
    return analyse(question([*overrides_of(**short), *texts]), rules)


def codes(planned, *, severity=None):
    return [problem.code for problem in planned.problems if severity in (None, problem.severity)]


def upstream(planned):
    return [problem.upstream_message for problem in planned.problems if problem.upstream_message]
