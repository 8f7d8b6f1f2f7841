"""Model, optimizer and random-number state of one training process group, on disk and back, bit for bit.

Takes a module (plain, or sharded by FSDP2) and its optimizer; gives files in a folder:

- ``shard-R-model-I-of-N.safetensors``: what rank R holds of ``model.<parameter>`` and
  ``optimizer.<parameter>.<state>``, written and read by torch's distributed checkpoint in its safetensors
  form, so any number of ranks can read what any other number wrote, and no pickle is ever loaded;
- ``training_state.json``: names, shapes and dtypes of all tensors, optimizer options, counters;
- ``rng_rank_R.json``: Python, NumPy, torch CPU and CUDA generators of rank R.

Parameters that are tied are stored once. Where an adapter is trained, its parameters and their optimizer state are all that
is stored, with what is needed to know its base again (``checkpoint_adapter.py``). Leaves out atomicity, completeness and which checkpoint is the
newest (``train.journal.checkpoints``), and the Hugging Face form (``checkpoint_export.py``).
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from trainfer.errors import CheckpointError
from trainfer.train.update.checkpoint_adapter import StoredAdapter, check_adapter
from trainfer.train.update.checkpoint_names import (
    MODEL_PREFIX,
    model_tensors,
    optimizer_scalars,
    optimizer_tensors,
    prepare_optimizer_state,
)
from trainfer.train.update.checkpoint_rng import load_rng_state, rng_file, rng_text
from trainfer.train.update.checkpoint_tensors import StoredTensor, check_tensors, stored_tensors
from trainfer.train.update.checkpoint_writer import ShardFile, ShardWriter

STATE_FILE = "training_state.json"
SCHEMA = "trainfer.training_state/1"
MAX_FILE_BYTES = 2**30
"""Tensors are spread over files of about this size: a rank copies one file at a time from the GPU."""

Scalar = int | float | str | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedState:
    """What ``load_training_state`` found beside the tensors it restored in place."""

    counters: Mapping[str, Scalar]
    rng_restored: bool
    """False when this rank did not exist in the run that saved (another number of ranks)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredState:
    """``training_state.json``."""

    counters: Mapping[str, Scalar]
    tensors: Mapping[str, StoredTensor]
    optimizer_scalars: Mapping[str, Mapping[str, Scalar]]
    optimizer_groups: list[dict]
    adapter: StoredAdapter | None
    """None: the whole model is stored."""


def save_training_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: Mapping[str, Scalar],
    *,
    adapter: StoredAdapter | None = None,
) -> None:
    """Write everything below ``folder``; every rank calls it, rank 0 writes what is common.

    Raises:
        CheckpointError: a file cannot be written (full disk, no permission); what is there is incomplete.
    """
    stage_training_state(folder, model, optimizer, counters, adapter=adapter, in_memory=False).write()


def stage_training_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: Mapping[str, Scalar],
    *,
    adapter: StoredAdapter | None = None,
    in_memory: bool = True,
) -> "StagedState":
    """The state as it is now, to be written below ``folder`` later by ``write``; every rank calls it.

    All that ranks do together is done here. ``in_memory`` False writes the tensors at once, one file at a time, and leaves
    the small files alone to ``write``; otherwise a copy of this rank's part is held in host memory.

    Raises:
        CheckpointError: a file cannot be written.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors = _stored_part(model, adapter)
    scalars: dict[str, dict[str, Scalar]] = {}
    groups: list[dict[str, object]] = []
    if optimizer is not None:
        tensors |= optimizer_tensors(model, optimizer)
        scalars, groups = optimizer_scalars(model, optimizer)
    writer = ShardWriter(folder, _spread(tensors), staged=in_memory)
    with _told_as_checkpoint_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with quiet_single_process():
            save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    texts = {rng_file(folder, rank): rng_text()}
    if rank == 0:
        state = {
            "schema": SCHEMA,
            "counters": dict(counters),
            "tensors": {name: StoredTensor.of(tensor).to_json() for name, tensor in tensors.items()},
            "optimizer_scalars": scalars,
            "optimizer_groups": groups,
            **({} if adapter is None else {"adapter": adapter.to_json()}),
        }
        texts[folder / STATE_FILE] = json.dumps(state, indent=1)
    return StagedState(folder=folder, files=tuple(writer.files), texts=texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """What one rank still has to write."""

    folder: Path
    files: tuple[ShardFile, ...]
    texts: Mapping[Path, str]

    def write(self) -> None:
        """Write it; meets no other rank.

        Raises:
            CheckpointError: a file cannot be written.
        """
        with _told_as_checkpoint_errors(self.folder):
            for file in self.files:
                file.write()
            for path, text in self.texts.items():
                path.write_text(text, encoding="utf-8")


@contextmanager
def _told_as_checkpoint_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"cannot write tensors to {folder}: {first_cause(error)}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write to {folder}: {error}") from error


def load_training_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    adapter: StoredAdapter | None = None,
) -> LoadedState:
    """Restore ``model`` and ``optimizer`` in place, and this process's random generators.

    Every tensor's name, shape and dtype is checked before the first one is changed.

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors are not those of this model.
    """
    state = read_state(folder)
    check_adapter(state.adapter, adapter, where=f"the checkpoint {folder}")
    listed = state.tensors
    reader = HuggingFaceStorageReader(str(folder))
    check_tensors(listed, stored_tensors(reader, folder), where=f"the files of {folder}")
    targets = _stored_part(model, adapter)
    wanted = {name: StoredTensor.of(tensor) for name, tensor in targets.items()}
    in_model = {name: entry for name, entry in listed.items() if name.startswith(MODEL_PREFIX)}
    check_tensors(wanted, in_model, where=f"the checkpoint {folder}")
    if optimizer is not None:
        targets |= prepare_optimizer_state(
            model,
            optimizer,
            tensors={name: entry for name, entry in listed.items() if name not in in_model},
            scalars=state.optimizer_scalars,
            groups=state.optimizer_groups,
        )
    try:
        with quiet_single_process(), torch.no_grad():
            load_tensors(dict(targets), storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"Cannot read tensors from {folder}: {first_cause(error)}") from error
    rank = dist.get_rank() if dist.is_initialized() else 0
    return LoadedState(counters=state.counters, rng_restored=load_rng_state(folder, rank))


def read_state(folder: Path) -> StoredState:
    """``training_state.json``, its shape checked.

    Raises:
        CheckpointError: missing, damaged or of another version.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"Cannot read {path}: {error}. It is part of every checkpoint of trainfer."
        ) from error
    parts = {"counters": dict, "tensors": dict, "optimizer_scalars": dict, "optimizer_groups": list}
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path} is not of the form {SCHEMA}; another version of trainfer wrote it.")
    for name, kind in parts.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(f"{path} is damaged: {name} is missing. Use an older checkpoint.")
    return StoredState(
        counters=state["counters"],
        tensors={name: StoredTensor.from_json(entry) for name, entry in state["tensors"].items()},
        optimizer_scalars=state["optimizer_scalars"],
        optimizer_groups=state["optimizer_groups"],
        adapter=StoredAdapter.from_json(state["adapter"]) if "adapter" in state else None,
    )


def _stored_part(model: nn.Module, adapter: StoredAdapter | None) -> dict[str, Tensor]:
    """The model's tensors that a checkpoint holds."""
    own = None if adapter is None else adapter.layout.parameter_names
    return {
        MODEL_PREFIX + name: tensor
        for name, tensor in model_tensors(model).items()
        if own is None or name in own
    }


def _spread(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Tensor name -> number of the file it goes to, from 1; about ``MAX_FILE_BYTES`` a file and rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    index, filled, mapping = 1, 0, {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // ranks
        if filled and filled + size > MAX_FILE_BYTES:
            index, filled = index + 1, 0
        filled += size
        mapping[name] = index
    return mapping


def first_cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


@contextmanager
def quiet_single_process() -> Iterator[None]:
    """Torch warns on each single-process save and load that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield
