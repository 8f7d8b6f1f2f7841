"""The section ``data``: which prompts are read, and how they are shaped into steps."""

from typing import Annotated, Literal

from msgspec import Meta, field

from trainfer.config.fields import Count, CountOrAll, Section, Seed, Text, Texts


class DataConfig(Section, frozen=True, kw_only=True):
    """Which prompts are read, how many a step takes, and how long they may be."""

    train_files: Annotated[
        Text | Texts,
        Meta(
            description="Parquet or JSONL file of training prompts, or a list of them, read in this order. "
            "Relative to the current folder; ${config_dir:} is the folder of the YAML file. Required."
        ),
    ]
    val_files: Annotated[
        Text | Texts | None,
        Meta(description="Parquet or JSONL file of held-out prompts, or a list. null: no validation."),
    ] = None
    train_batch_size: Annotated[
        Count,
        Meta(description="Prompts per step over all ranks; a step samples rollout.n sequences of each."),
    ] = 1024
    val_batch_size: Annotated[
        Count | None,
        Meta(description="Prompts per validation batch. null: the whole validation set at once."),
    ] = None
    max_prompt_length: Annotated[
        Count, Meta(description="Most tokens of one prompt, chat template included; see truncation.")
    ] = 512
    max_response_length: Annotated[
        Count, Meta(description="Most tokens sampled for one response, the stop token included.")
    ] = 512
    prompt_key: Annotated[
        Text, Meta(description="Column that holds the prompt as a list of chat messages {role, content}.")
    ] = "prompt"
    reward_fn_key: Annotated[
        Text, Meta(description="Column that names the scorer of a row (verl's data_source).")
    ] = "data_source"
    shuffle: Annotated[
        bool,
        Meta(description="Draw a new order of the training prompts for each epoch; false keeps the file's."),
    ] = True
    seed: Annotated[Seed | None, Meta(description="Seed of the prompt order. null: trainfer.seed.")] = None
    filter_overlong_prompts: Annotated[
        bool,
        Meta(description="Leave out prompts of more than max_prompt_length tokens; the number is reported."),
    ] = False
    truncation: Annotated[
        Literal["error", "left", "right", "middle"],
        Meta(
            description="What happens to a prompt of more than max_prompt_length tokens that was not filtered: "
            "an error, or tokens cut off at its left, right or middle."
        ),
    ] = "error"
    train_max_samples: Annotated[
        CountOrAll,
        Meta(
            description="Most rows used of the training files together: a random choice with shuffle, else the first. -1: all."
        ),
    ] = -1
    val_max_samples: Annotated[
        CountOrAll,
        Meta(description="Most rows used of the validation files together, chosen likewise. -1: all."),
    ] = -1
    apply_chat_template_kwargs: Annotated[
        dict[str, object],
        Meta(description="Named values handed to the chat template, e.g. {enable_thinking: false}."),
    ] = field(default_factory=dict[str, object])

    def train_paths(self) -> tuple[str, ...]:
        """``train_files`` as a tuple."""
        return (self.train_files,) if isinstance(self.train_files, str) else self.train_files

    def val_paths(self) -> tuple[str, ...]:
        """``val_files`` as a tuple, empty without validation."""
        if self.val_files is None:
            return ()
        return (self.val_files,) if isinstance(self.val_files, str) else self.val_files
