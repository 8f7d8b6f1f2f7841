"""The group of workers that the configuration asks for, and the folder of the model that they load.

Takes ``Inputs`` and that folder; gives a ``WorkerGroup``: of this process alone, of the processes that torchrun has
started, or of those that Ray starts. What a single rank holds is built in ``build_rank.py``.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from trainfer.engines.registry import make_engine
from trainfer.engines.scripted.engine import ScriptedAnswer
from trainfer.errors import ConfigError, WorkerError
from trainfer.integrations.transformers.generation import end_token_id
from trainfer.train.rollout.engine import Engine
from trainfer.workers.build_rank import DTYPES, build_actor, build_ref, gets_merged_weights, load_engine
from trainfer.workers.group import WorkerGroup
from trainfer.workers.inputs import Inputs
from trainfer.workers.launched import launched_by_torchrun
from trainfer.workers.local_group import LocalGroup
from trainfer.workers.rank import RankSetup
from trainfer.workers.ranked_group import RankedGroup
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.warmup import warmed_up_model


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


def build_group(inputs: Inputs, model_folder: Path) -> WorkerGroup:
    """Load what the configuration asks for: in this process for one rank, in several under torchrun or Ray.

    Raises:
        ModelError: the folder cannot be used. EngineError: the engine cannot. WorkerError: workers cannot be started.
    """
    if inputs.plan.num_ranks == 1:
        return build_local_group(inputs, model_folder)
    setup = RankSetup(
        config=inputs.config,
        plan=inputs.plan,
        model_folder=model_folder.absolute(),
        total_steps=inputs.total_steps,
        device_type=inputs.device.type,
    )
    assert inputs.config.trainer.default_local_dir is not None, "the schema fills it in"
    run_folder = Path(inputs.config.trainer.default_local_dir).absolute()
    launched = launched_by_torchrun()
    if launched is not None:
        from trainfer.workers.torchrun_group import TorchrunTransport

        return RankedGroup(TorchrunTransport(setup, launched, run_folder), setup)
    try:
        from trainfer.workers.ray_group import start_ray
    except ImportError as error:
        raise WorkerError(
            f"{inputs.plan.num_ranks} ranks need Ray, which is not installed ({error}): pip install 'trainfer[ray]', or "
            "start with torchrun."
        ) from error
    return RankedGroup(start_ray(setup, run_folder), setup)


def build_local_group(inputs: Inputs, model_folder: Path) -> LocalGroup:
    """One rank in this process."""
    config, plan, device = inputs.config, inputs.plan, inputs.device
    sections = config.actor_rollout_ref
    torch.manual_seed(config.trainfer.seed)
    rollout_dtype = DTYPES[sections.rollout.dtype]
    actor = build_actor(config, plan, model_folder, device, total_steps=inputs.total_steps, meshes=None)
    ref = build_ref(config, plan, model_folder, device, meshes=None, actor=actor)
    return LocalGroup(
        actor=actor,
        rollout=RolloutWorker(build_engine(inputs, model_folder, rollout_dtype)),
        ref=ref,
        rollout_dtype=rollout_dtype,
        sends_merged=gets_merged_weights(config),
        mini_batch_sequences=plan.mini_batch_sequences,
        epochs=plan.ppo_epochs,
        shuffle_seed=sections.actor.data_loader_seed if sections.actor.shuffle else None,
        model_folder=model_folder,
    )


def build_engine(inputs: Inputs, model_folder: Path, dtype: torch.dtype, *, adapted: bool = True) -> Engine:
    """The rollout engine with a model of its own; ``adapted`` False where the folder's model has its adapter merged in."""
    if inputs.config.actor_rollout_ref.rollout.name == "scripted":
        return make_engine("scripted", answers=read_script(inputs))
    return load_engine(inputs.config, model_folder, inputs.device, dtype, adapted=adapted)


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
