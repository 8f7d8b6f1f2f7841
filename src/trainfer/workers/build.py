"""Models and engine for the configuration: the group of workers of this process.

Takes ``Inputs`` and the folder of the model; gives a ``LocalGroup``. Weights are read once per role: the
actor's in the master format, the ref's and the engine's in the formats that they compute in.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.engines.scripted.engine import ScriptedAnswer
from trainfer.errors import ConfigError
from trainfer.integrations.transformers.generation import end_token_id
from trainfer.integrations.transformers.load import load_model
from trainfer.integrations.transformers.recompute import recompute_activations
from trainfer.train.rollout.engine import Engine
from trainfer.workers.actor import ActorWorker
from trainfer.workers.inputs import Inputs
from trainfer.workers.local_group import LocalGroup
from trainfer.workers.ref import RefWorker
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.settings import old_log_prob_limit, ref_log_prob_limit, stages, trainer_settings
from trainfer.workers.warmup import warmed_up_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def find_model_folder(
    inputs: Inputs, run_folder: Path, *, on_warmup: Callable[[int, float], None] | None = None
) -> Path:
    """``actor_rollout_ref.model.path``, or the folder of the model that the warm-up makes below ``run_folder``."""
    model, warmup = inputs.config.actor_rollout_ref.model, inputs.config.trainfer.warmup
    if warmup is None:
        assert model.path is not None, "read_inputs has asked for it"
        return Path(model.path)
    return warmed_up_model(
        run_folder,
        warmup,
        inputs.tokenizer,
        inputs.training.prompts,
        max_positions=inputs.plan.max_sequence_tokens,
        on_step=on_warmup,
    )


def build_group(inputs: Inputs, model_folder: Path) -> LocalGroup:
    """Load what the configuration asks for.

    Raises:
        ModelError: the folder cannot be used. EngineError: the engine cannot.
    """
    config, plan, device = inputs.config, inputs.plan, inputs.device
    sections = config.actor_rollout_ref
    torch.manual_seed(config.trainfer.seed)
    fsdp = sections.actor.fsdp_config
    compute_dtype = DTYPES[fsdp.mixed_precision.param_dtype or fsdp.dtype]
    master = load_model(model_folder, dtype=DTYPES[fsdp.model_dtype], device=device)
    if sections.model.enable_gradient_checkpointing:
        recompute_activations(master)
    rollout_dtype = DTYPES[sections.rollout.dtype]
    ref = (
        RefWorker(
            load_model(model_folder, dtype=compute_dtype, device=device),
            log_prob_limit=ref_log_prob_limit(plan),
            device=device,
        )
        if stages(config, plan).ref
        else None
    )
    return LocalGroup(
        actor=ActorWorker(
            master,
            trainer_settings(config, plan, total_steps=inputs.total_steps),
            compute_dtype=compute_dtype,
            log_prob_limit=old_log_prob_limit(plan),
            device=device,
        ),
        rollout=RolloutWorker(build_engine(inputs, model_folder, rollout_dtype)),
        ref=ref,
        rollout_dtype=rollout_dtype,
        mini_batch_sequences=plan.mini_batch_sequences,
        epochs=plan.ppo_epochs,
        shuffle_seed=sections.actor.data_loader_seed if sections.actor.shuffle else None,
        model_folder=model_folder,
    )


def build_engine(inputs: Inputs, model_folder: Path, dtype: torch.dtype) -> Engine:
    """The rollout engine with a model of its own."""
    rollout = inputs.config.actor_rollout_ref.rollout
    if rollout.name == "scripted":
        return make_engine("scripted", answers=read_script(inputs))
    builtin = inputs.config.trainfer.builtin_engine
    model: nn.Module = load_model(model_folder, dtype=dtype, device=inputs.device)
    limits = EngineLimits(
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        block_size=builtin.kv_block_tokens,
        cache_tokens=builtin.kv_cache_tokens,
        share_prefixes=rollout.enable_prefix_caching,
    )
    return make_engine(rollout.name, model=model, limits=limits)


def read_script(inputs: Inputs) -> list[ScriptedAnswer]:
    """``trainfer.scripted_responses``: a line is ``{"response": TEXT}``, or ``{"token_ids": […], "logprobs": […]}``.

    A text is tokenised and gets the end token; its log-probs are 0, for nobody sampled it.

    Raises:
        ConfigError: the file or a line cannot be used.
    """
    path, tokenizer = inputs.config.trainfer.scripted_responses, inputs.tokenizer
    assert path is not None, "check_honoured has asked for it"
    answers: list[ScriptedAnswer] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trainfer.scripted_responses={path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if "response" in record:
                ids = tokenizer.encode(record["response"], add_special_tokens=False)
                ids = (*ids, end_token_id(tokenizer))
                answers.append(ScriptedAnswer(token_ids=ids, logprobs=(0.0,) * len(ids)))
            else:
                ids, logprobs = record["token_ids"], record["logprobs"]
                answers.append(ScriptedAnswer(token_ids=tuple(ids), logprobs=tuple(map(float, logprobs))))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'trainfer.scripted_responses={path}, line {number}: wanted {{"response": TEXT}} or {{"token_ids": […], '
                f'"logprobs": […]}} ({type(error).__name__}: {error}).'
            ) from error
    return answers
