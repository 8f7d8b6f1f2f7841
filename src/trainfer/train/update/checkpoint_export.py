"""A training checkpoint as a folder that Transformers and vLLM load: config, tokenizer, safetensors.

Takes the folder that ``save_training_state`` wrote, or that of verl's FSDP workers (``checkpoint_verl.py``), and the
model's own small files; gives ``model*.safetensors``
with the stored bits (or cast, when a dtype is asked for; an adapter merged into its base), at most one output file in memory at a time. Reads
shards of any number of ranks; loads no pickle and no Transformers. A tied head is stored once, as it was.
Leaves out which checkpoint (``cli.export``) and whether the folder may be written.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from trainfer.errors import CheckpointError
from trainfer.train.update.checkpoint import STATE_FILE, first_cause, quiet_single_process, read_state
from trainfer.train.update.checkpoint_merge import BaseWeights, merged_reader, write_adapter_folder
from trainfer.train.update.checkpoint_names import MODEL_PREFIX
from trainfer.train.update.checkpoint_tensors import StoredTensor, check_tensors, stored_tensors
from trainfer.train.update.checkpoint_verl import VerlShards, holds_verl_shards

MODEL_FILES_FOLDER = "huggingface"
"""Beside the training state in every checkpoint: config and tokenizer of the model, as in verl's checkpoints."""
MAX_EXPORT_FILE_BYTES = 4 * 2**30

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "chat_template*",
    "preprocessor_config.json",
)
"""Small files that describe a model; weights and Python code are not among them."""
_MAX_MODEL_FILE_BYTES = 200_000_000
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".py")
_WEIGHT_INDEX = ".index.json"
"""What verl may have put beside the config: weights of another kind, and code."""


def copy_model_files(model_folder: Path, checkpoint: Path) -> None:
    """Copy config and tokenizer of the model that is trained into ``checkpoint/huggingface``.

    Raises:
        CheckpointError: there is no ``config.json``, or a file cannot be copied.
    """
    target = checkpoint / MODEL_FILES_FOLDER
    sources = {
        path.name: path for pattern in _MODEL_FILES for path in model_folder.glob(pattern) if path.is_file()
    }
    if "config.json" not in sources:
        raise CheckpointError(
            f"{model_folder} holds no config.json: the checkpoint could not be exported later."
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, path in sorted(sources.items()):
            if path.stat().st_size <= _MAX_MODEL_FILE_BYTES:
                shutil.copyfile(path, target / name)
    except OSError as error:
        raise CheckpointError(f"cannot copy {model_folder} to {target}: {error}") from error


def find_training_state(checkpoint: Path) -> Path:
    """The folder below ``checkpoint`` that ``save_training_state`` wrote.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (checkpoint / "actor", checkpoint):
        if (folder / STATE_FILE).is_file():
            return folder
    raise CheckpointError(f"{checkpoint} holds no {STATE_FILE}: it is not a checkpoint of trainfer.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """Where a checkpoint's weights are."""

    stored: Mapping[str, StoredTensor]
    """Under Transformers' names, in the order of the model."""
    read: Callable[[Sequence[str]], dict[str, Tensor]]
    """Some of them, whole."""


def holds_checkpoint_of_verl(checkpoint: Path) -> bool:
    """True for verl's ``global_step_N``, or the folder ``actor`` in it."""
    return _verl_folder(checkpoint) is not None


def write_model_folder(
    checkpoint: Path, out: Path, *, dtype: torch.dtype | None, base: Path | None = None
) -> int:
    """Write config, tokenizer and weights into the existing empty folder ``out``; returns bytes of weights.

    Args:
        checkpoint: Of trainfer, or of verl's FSDP workers.
        out: Gets the files.
        dtype: None keeps the stored bits; floating tensors are cast otherwise.
        base: Folder of the model that an adapter is merged into. None: the one that it was trained on.

    Raises:
        CheckpointError: something is missing or damaged, or ``out`` cannot be written.
    """
    verl = _verl_folder(checkpoint)
    model_files = _model_files_of(checkpoint if verl is None else verl)
    source = _own_weights(checkpoint, base) if verl is None else _verl_weights(verl, model_files)
    kept = dtype or _main_dtype(source.stored)
    try:
        for path in sorted(model_files.iterdir()):
            if not path.is_file() or path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(_WEIGHT_INDEX):
                continue
            shutil.copyfile(path, out / path.name)
        _set_config_dtype(out / "config.json", kept)
        return _write_weights(source, out, dtype)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {out}: {error}. Free space there or name another folder."
        ) from error


def write_adapter(checkpoint: Path, out: Path, *, dtype: torch.dtype | None) -> int:
    """Write the adapter of a checkpoint as a folder that PEFT loads, into the existing empty folder ``out``; returns bytes.

    Raises:
        CheckpointError: it holds no adapter, is damaged, or ``out`` cannot be written.
    """
    folder = find_training_state(checkpoint)
    adapter = read_state(folder).adapter
    if adapter is None:
        raise CheckpointError(
            f"{checkpoint} holds a whole model, not an adapter (actor_rollout_ref.model.lora_rank was 0). Export it without "
            "--adapter."
        )
    try:
        return write_adapter_folder(adapter, _stored_weights(folder).read, out, dtype)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {out}: {error}. Free space there or name another folder."
        ) from error


def _verl_folder(checkpoint: Path) -> Path | None:
    return next((folder for folder in (checkpoint / "actor", checkpoint) if holds_verl_shards(folder)), None)


def _own_weights(checkpoint: Path, base: Path | None) -> WeightSource:
    folder = find_training_state(checkpoint)
    adapter = read_state(folder).adapter
    source = _stored_weights(folder)
    if adapter is None:
        return source
    weights = BaseWeights(base or Path(adapter.layout.base_folder))
    return WeightSource(stored=weights.stored, read=merged_reader(adapter, source.read, weights))


def _stored_weights(folder: Path) -> WeightSource:
    """What a training state holds of the model."""
    stored = {
        name: entry for name, entry in read_state(folder).tensors.items() if name.startswith(MODEL_PREFIX)
    }
    check_tensors(
        stored,
        {
            name: entry
            for name, entry in stored_tensors(HuggingFaceStorageReader(str(folder)), folder).items()
            if name.startswith(MODEL_PREFIX)
        },
        where=f"the files of {folder}",
    )

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = _read(folder, {MODEL_PREFIX + name: stored[MODEL_PREFIX + name] for name in names})
        return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}

    return WeightSource(
        stored={name.removeprefix(MODEL_PREFIX): entry for name, entry in stored.items()}, read=read
    )


def _verl_weights(folder: Path, model_files: Path) -> WeightSource:
    shards = VerlShards.open(folder)
    tied = _config_of(model_files / "config.json").get("tie_word_embeddings") is True
    return WeightSource(stored=shards.stored(tied=tied), read=shards.read)


def _model_files_of(checkpoint: Path) -> Path:
    folder = checkpoint / MODEL_FILES_FOLDER
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder / 'config.json'} is missing, so no model can be built from {checkpoint}. Copy config.json and "
            "the tokenizer files of the base model there."
        )
    return folder


def _main_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Floating dtype of most values."""
    counts: dict[torch.dtype, int] = {}
    for entry in stored.values():
        if entry.dtype.is_floating_point:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.num_values
    if not counts:
        raise CheckpointError("The checkpoint holds no floating-point tensor of a model.")
    return max(counts, key=lambda dtype: counts[dtype])


def _set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    """Transformers casts to the config's dtype when it loads: it must be that of the file."""
    config = _config_of(path)
    name = str(dtype).removeprefix("torch.")
    config["dtype"] = name
    if "torch_dtype" in config:  # the name of the same key in older folders
        config["torch_dtype"] = name
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _config_of(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} of the checkpoint is damaged: {error}. Copy it from the base model."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name} of the checkpoint is not a mapping. Copy it from the base model.")
    return config


def _write_weights(source: WeightSource, out: Path, dtype: torch.dtype | None) -> int:
    files = _split(source.stored, dtype)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, start=1):
        name = (
            "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        tensors = {
            full: value if dtype is None or not value.is_floating_point() else value.to(dtype)
            for full, value in source.read(names).items()
        }
        save_file(tensors, out / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return total


def _split(stored: Mapping[str, StoredTensor], dtype: torch.dtype | None) -> list[list[str]]:
    """Names in the order of the model, cut where a file would grow over the limit."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, entry in stored.items():
        kept = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        size = entry.num_values * kept.itemsize
        if files[-1] and filled + size > MAX_EXPORT_FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _read(folder: Path, wanted: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in wanted.items()}
    try:
        with quiet_single_process():
            load_tensors(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"Cannot read tensors from {folder}: {first_cause(error)}") from error
    return tensors
