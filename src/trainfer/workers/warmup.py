"""The demonstration's model, made on the spot: a tiny model, warmed up on the training file.

Takes ``trainfer.warmup`` and the data files; gives a Hugging Face folder below the run folder that is loaded like any
other. The folder appears whole or not at all, and is made again when the settings or the data changed.
Leaves out the warm-up's arithmetic (``train.update.warmup``).
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from trainfer.config.schema import TrainConfig, WarmupConfig
from trainfer.integrations.transformers.characters import character_tokenizer
from trainfer.integrations.transformers.generation import end_token_id
from trainfer.integrations.transformers.load import byte_tokenizer, save_model, tiny_model
from trainfer.train.data.files import check_paths, read_rows
from trainfer.train.data.problems import ProblemList
from trainfer.train.data.schema import Columns
from trainfer.train.update.warmup import WarmupSettings, demonstration_examples, warm_up
from trainfer.types import Prompt

MODEL_FOLDER = "warmup_model"
MADE_FROM = "made_from.json"


def warmup_tokenizer(config: TrainConfig, warmup: WarmupConfig) -> PreTrainedTokenizerBase:
    """Bytes, or the characters of the training files: equal files give an equal tokenizer, whatever is validated on."""
    if warmup.vocabulary == "byte":
        return byte_tokenizer()
    files = [Path(name) for name in config.data.train_paths()]
    columns = Columns(prompt=config.data.prompt_key, data_source=config.data.reward_fn_key).read()
    problems = ProblemList()
    check_paths(files, problems)
    problems.raise_if_any()
    rows = [row for path in files for row in read_rows(path, columns, problems)]
    problems.raise_if_any()
    return character_tokenizer(_texts([row.values for row in rows]))


def warmed_up_model(
    folder: Path,
    warmup: WarmupConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_positions: int,
    on_step: Callable[[int, float], None] | None = None,
) -> Path:
    """The folder of the warmed-up model below ``folder``; made if it is not there for these very settings.

    Raises:
        DataError: the data holds nothing to learn from.
        ConfigError: the loss is not finite.
    """
    path = folder / MODEL_FOLDER
    made_from = _digest(warmup, tokenizer, prompts, max_positions)
    if _recorded(path / MADE_FROM) == made_from:
        return path
    assert warmup.seed is not None, "the schema fills it in"
    model = tiny_model(
        warmup.architecture,
        vocab_size=len(tokenizer),
        hidden_size=warmup.hidden_size,
        intermediate_size=warmup.intermediate_size,
        num_layers=warmup.num_layers,
        num_heads=warmup.num_heads,
        num_kv_heads=warmup.num_kv_heads,
        max_positions=max_positions,
        seed=warmup.seed,
    )
    if warmup.steps:
        examples = demonstration_examples(
            prompts,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            end_token_id=end_token_id(tokenizer),
        )
        settings = WarmupSettings(
            steps=warmup.steps,
            batch_size=warmup.batch_size,
            lr=warmup.lr,
            weight_decay=warmup.weight_decay,
            seed=warmup.seed,
        )
        warm_up(model, examples, settings, on_step=on_step)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".making-{MODEL_FOLDER}"
    shutil.rmtree(partial, ignore_errors=True)
    save_model(model, partial, tokenizer=tokenizer)
    (partial / MADE_FROM).write_text(json.dumps({"digest": made_from}), encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    return path


def _digest(
    warmup: WarmupConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_positions: int
) -> str:
    parts = [
        msgspec.to_builtins(warmup),
        tokenizer.get_vocab(),
        [(prompt.token_ids, prompt.extra_info) for prompt in prompts],
        max_positions,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _recorded(path: Path) -> str | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("digest") if isinstance(record, dict) else None


def _texts(values: Sequence[object]) -> list[str]:
    """Every text in nested rows."""
    texts: list[str] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return texts
