"""Everything a run needs but models: what is cheap to check is checked here, in order of cost.

Takes a loaded configuration; gives plan, device, tokenizer and prompts, or the one error that says what is
wrong. Opens no run folder and loads no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from trainfer.config.load import LoadedConfig
from trainfer.config.schema import TrainConfig
from trainfer.errors import ConfigError
from trainfer.integrations.transformers.generation import ResponseDecoder, max_positions
from trainfer.integrations.transformers.load import load_tokenizer
from trainfer.plan.records import StepPlan
from trainfer.plan.step import plan_step
from trainfer.train.data.order import PromptOrder, steps_total
from trainfer.train.data.prompts import PromptTable, load_prompts
from trainfer.train.journal.loggers import check_loggers
from trainfer.train.reward.registry import known_data_sources
from trainfer.workers.checks import check_honoured
from trainfer.workers.warmup import warmup_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run starts from."""

    loaded: LoadedConfig
    plan: StepPlan
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    training: PromptTable
    validation: PromptTable | None
    order: PromptOrder
    total_steps: int
    """Of the whole run, from its first step."""

    @property
    def decoder(self) -> ResponseDecoder:
        """Text of a response."""
        return ResponseDecoder(self.tokenizer)

    @property
    def config(self) -> TrainConfig:
        """The configuration."""
        return self.loaded.config


def read_inputs(loaded: LoadedConfig) -> Inputs:
    """Check and read.

    Raises:
        PlanError, ConfigError, ModelError, DataError: whatever is wrong first, cheapest check first.
    """
    config = loaded.config
    plan = plan_step(config)
    check_honoured(config, plan)
    check_loggers(config.trainer.logger)
    device = choose_device(config.trainer.device)
    tokenizer = read_tokenizer(config)
    training = read_prompts(config, tokenizer, config.data.train_paths(), config.data.train_max_samples)
    validation = (
        read_prompts(config, tokenizer, config.data.val_paths(), config.data.val_max_samples)
        if config.data.val_paths()
        else None
    )
    check_positions(config, training, validation)
    assert config.data.seed is not None, "the schema fills it in"
    order = PromptOrder(
        num_rows=len(training.prompts),
        prompts_per_step=plan.prompts_per_step,
        shuffle=config.data.shuffle,
        seed=config.data.seed,
    )
    total_steps = steps_total(
        order.num_rows,
        order.prompts_per_step,
        total_epochs=config.trainer.total_epochs,
        total_training_steps=config.trainer.total_training_steps,
    )
    return Inputs(
        loaded=loaded,
        plan=plan,
        device=device,
        tokenizer=tokenizer,
        training=training,
        validation=validation,
        order=order,
        total_steps=total_steps,
    )


def choose_device(name: str) -> torch.device:
    """``trainer.device``: auto takes a GPU where there is one.

    Raises:
        ConfigError: cuda is asked for and not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but torch finds no GPU here; set trainer.device=cpu or auto, or install a torch with CUDA."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def read_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one that the warm-up makes.

    Raises:
        ConfigError: no model is named. ModelError: the folder has no tokenizer.
    """
    model, warmup = config.actor_rollout_ref.model, config.trainfer.warmup
    if warmup is not None and model.tokenizer_path is None:
        tokenizer = warmup_tokenizer(config, warmup)
    elif model.tokenizer_path is not None:
        tokenizer = load_tokenizer(Path(model.tokenizer_path))
    else:
        raise ConfigError(
            "actor_rollout_ref.model.path is not set; name a local Hugging Face folder, or let trainfer.warmup make a tiny model."
        )
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def check_positions(config: TrainConfig, *tables: PromptTable | None) -> None:
    """The longest prompt and a whole response must fit the positions that the model knows.

    Raises:
        ConfigError: they do not. ModelError: the model's config cannot be read.
    """
    path = config.actor_rollout_ref.model.path
    if path is None:  # the warm-up makes a model that is long enough
        return
    known = max_positions(path)
    prompts = [prompt for table in tables if table is not None for prompt in table.prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    wanted = longest + config.data.max_response_length
    if known is not None and wanted > known:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and data.max_response_length={config.data.max_response_length}, together "
            f"{wanted}, but {path} knows {known} positions. Lower data.max_response_length to at most {known - longest}, "
            "or data.max_prompt_length with filter_overlong_prompts."
        )


def read_prompts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, files: Sequence[str], max_samples: int
) -> PromptTable:
    """The prompts of some files under the rules of ``data.*``.

    Raises:
        DataError: every problem of every row.
    """
    data = config.data
    return load_prompts(
        files,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_samples=max_samples,
        sample_seed=data.seed if data.shuffle else None,
        known_data_sources=known_data_sources(),
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
