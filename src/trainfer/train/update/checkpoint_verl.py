"""verl's FSDP checkpoints: ``model_world_size_W_rank_R.pt``, one pickled state dict per rank, read without running a pickle.

Takes the folder that holds them (verl's ``global_step_N/actor``); gives each tensor's shape and, on demand, the tensor
put together from the shards, bit for bit and in its own dtype. Which files there must be follows from their names;
``fsdp_config.json``, where it is there, must agree.

No pickled class is imported and none of its code runs: torch's restricted loader builds tensors, and every class of
``torch.distributed`` that a file names is replaced by a record that keeps its arguments. Any other class is refused.
So files of any version of torch are read, without a process group. Files are mapped, not read whole.

Leaves out optimizer state, and LoRA adapters, which are refused by name.
"""

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
)

from trainfer.errors import CheckpointError
from trainfer.train.update.checkpoint_tensors import StoredTensor

_NAME = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_STAND_IN = "torch.distributed."
_MEMBER = "builtins.getattr"
"""How a class inside a class is pickled, or a member of an enumeration; it is stood for too, so nothing is looked up."""
_DTENSOR = "DTensor"
_SHARDED = "ShardedTensor"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = "lm_head.weight"


class Record:
    """Stands for an object of a class that is not loaded: what it was made from, and its state."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> object:
        """One entry of its state; None where there is none."""
        return _fields(self.state).get(name)


class Member(Record):
    """Stands for an object of a class that is inside another one."""


def _member(_owner: object, _name: object) -> type[Member]:
    return Member


class StoredSharded(Tensor):
    """Stands for a DTensor or a ShardedTensor: its whole shape, and the state that holds this rank's part."""

    stored: Any

    def __setstate__(self, state: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.stored = state

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Tensor:
        raise NotImplementedError("a stored shard is only taken apart")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One rank's part of one tensor."""

    whole: StoredTensor
    tensor: Tensor | None
    """None where the rank holds nothing."""
    axis: int | None
    """Along which pieces follow one another in the order of the ranks; None: the piece is the whole."""
    offsets: tuple[int, ...] | None = None
    """Where the piece begins, if the file says so."""


class VerlShards:
    """The files of one checkpoint."""

    def __init__(self, pieces: Sequence[Mapping[str, Piece]], folder: Path) -> None:
        """``pieces``: by rank and name. Use ``open``."""
        self._pieces = pieces
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> "VerlShards":
        """Map all files and check that they belong together.

        Raises:
            CheckpointError: a rank's file is missing or damaged, or holds something else than sharded tensors.
        """
        pieces = [_read_rank(path) for path in rank_files(folder)]
        for rank, found in enumerate(pieces):
            if found.keys() != pieces[0].keys():
                name = sorted(found.keys() ^ pieces[0].keys())[0]
                raise CheckpointError(
                    f"{folder}: the files of rank 0 and rank {rank} hold other tensors ({name} is in one of them only); they are "
                    "not of one checkpoint."
                )
        return cls(pieces, folder)

    def stored(self, *, tied: bool) -> dict[str, StoredTensor]:
        """Shape and dtype of each tensor; a tensor that has two names is listed under the first.

        Args:
            tied: The model's config says that the head is the embedding (``tie_word_embeddings``).

        Raises:
            CheckpointError: adapters, or a head that differs from the embedding that it is tied to.
        """
        adapters = [name for name in self._pieces[0] if ".lora_A." in name or ".lora_B." in name]
        if adapters:
            raise CheckpointError(
                f"{self._folder} holds LoRA adapters ({adapters[0]}), which are not merged here; merge them with PEFT first."
            )
        kept: dict[str, StoredTensor] = {}
        seen: set[tuple[str | int, ...]] = set()
        for name, piece in self._pieces[0].items():
            place = self._place(name)
            if place not in seen:
                kept[name] = piece.whole
            seen.add(place)
        embedding = next((name for name in kept if name.endswith(_EMBEDDINGS)), None)
        if tied and embedding is not None and _HEAD in kept:
            pair = self.read([embedding, _HEAD])
            if not torch.equal(pair[embedding], pair[_HEAD]):
                raise CheckpointError(
                    f"{self._folder}: config.json ties {_HEAD} to {embedding}, but their values differ, so one of them would be "
                    "lost. Set tie_word_embeddings to false in huggingface/config.json to keep both."
                )
            del kept[_HEAD]
        return kept

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors.

        Raises:
            CheckpointError: shards do not add up to their tensor.
        """
        return {name: self._merge(name, [pieces[name] for pieces in self._pieces]) for name in names}

    def _place(self, name: str) -> tuple[str | int, ...]:
        """Where a tensor's bytes lie in every file: equal for two names of one tensor."""
        tensors = [pieces[name].tensor for pieces in self._pieces]
        filled = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
        return tuple(tensor.data_ptr() for tensor in filled) or (name,)

    def _merge(self, name: str, pieces: Sequence[Piece]) -> Tensor:
        whole, axis = pieces[0].whole, pieces[0].axis
        tensors = [piece.tensor for piece in pieces]
        if any(piece.offsets is not None for piece in pieces):
            return _placed(name, pieces)
        if axis is None:
            assert tensors[0] is not None
            return tensors[0].clone()
        parts: list[Tensor] = []
        held = 0
        for tensor in tensors:  # replicas of the first shard group follow it: stop where the tensor is whole
            if held == whole.shape[axis]:
                break
            assert tensor is not None
            parts.append(tensor)
            held += tensor.shape[axis]
        merged = torch.cat(parts, dim=axis) if parts else torch.empty(whole.shape, dtype=whole.dtype)
        if StoredTensor.of(merged) != whole:
            raise CheckpointError(
                f"{self._folder}: the shards of {name} make {StoredTensor.of(merged)}, not {whole}."
            )
        return merged


def holds_verl_shards(folder: Path) -> bool:
    """True when some file has the name of a rank's state dict."""
    return folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def rank_files(folder: Path) -> list[Path]:
    """The file of each rank.

    Raises:
        CheckpointError: a rank's file is missing, or the files are of several runs.
    """
    found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    worlds = {int(match.group(1)) for match in found.values() if match}
    if len(worlds) != 1:
        raise CheckpointError(
            f"{folder} holds files of runs with {', '.join(map(str, sorted(worlds)))} ranks; move all but one set elsewhere."
        )
    (world,) = worlds
    files = [folder / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:3])}{more}: each of the {world} ranks wrote a part of every tensor. Copy the "
            "missing files from the nodes that wrote them."
        )
    _check_config(folder / "fsdp_config.json", world)
    return files


def _check_config(path: Path, world: int) -> None:
    if not path.is_file():
        return
    try:
        told = json.loads(path.read_bytes())["world_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}). Remove it: it is not needed."
        ) from error
    if told != world:
        raise CheckpointError(
            f"{path} says world_size {told}, but the files beside it are those of {world} ranks."
        )


def _read_rank(path: Path) -> dict[str, Piece]:
    try:
        with _records_for_classes(path):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        OSError,
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {line[:300]}") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} is no state dict of a model.")
    return {name: _piece(f"{name} of {path}", value) for name, value in state.items()}


@contextmanager
def _records_for_classes(path: Path) -> Iterator[None]:
    """Inside, torch's restricted loader takes records for every class of ``torch.distributed`` that the file names."""
    before = get_safe_globals()
    clear_safe_globals()
    try:
        stands_for: list[Any] = []
        for name in get_unsafe_globals_in_checkpoint(path):
            if not name.startswith(_STAND_IN) and name != _MEMBER:
                raise CheckpointError(
                    f"{path} holds a pickled {name}, which could run code and is not opened; a checkpoint of verl's FSDP workers "
                    "holds sharded tensors alone."
                )
            if name == _MEMBER:
                stands_for += [(_member, name), (Member, f"{Member.__module__}.{Member.__qualname__}")]
                continue
            base = StoredSharded if name.rpartition(".")[2] in (_DTENSOR, _SHARDED) else Record
            stands_for.append((type(name.rpartition(".")[2], (base,), {}), name))
        add_safe_globals(stands_for)
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _piece(where: str, value: object) -> Piece:
    if isinstance(value, StoredSharded):
        return (_of_sharded_tensor if type(value).__name__ == _SHARDED else _of_dtensor)(where, value)
    if isinstance(value, Tensor):
        return Piece(whole=StoredTensor.of(value), tensor=value, axis=None)
    raise CheckpointError(f"{where} is a {type(value).__name__}, no tensor.")


def _of_dtensor(where: str, value: StoredSharded) -> Piece:
    fields = _fields(value.stored)
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    placements = spec.field("placements") if isinstance(spec, Record) else None
    if not isinstance(local, Tensor) or not isinstance(placements, tuple):
        raise CheckpointError(f"{where} is a sharded tensor of a form that is not known.")
    axes = [_axis(where, placement) for placement in placements]
    cut = [axis for axis in axes if axis is not None]
    if len(cut) > 1 or (cut and axes[-1] is None):
        raise CheckpointError(
            f"{where} is cut along several mesh dimensions, as tensor parallelism does; it cannot be merged."
        )
    whole = StoredTensor(shape=tuple(value.shape), dtype=local.dtype)
    return Piece(whole=whole, tensor=local, axis=cut[0] if cut else None)


def _fields(state: object) -> dict[str, object]:
    """Pickled state by name: a dict, or a pair of dicts where a class has slots."""
    parts = state if isinstance(state, tuple) else (state,)
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


def _axis(where: str, placement: object) -> int | None:
    """The dimension that a placement cuts; None for a replica."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    axis = placement.field("dim") if isinstance(placement, Record) else None
    if axis is None and isinstance(placement, Record) and placement.args:
        axis = placement.args[0]
    if kind != "Shard" or not isinstance(axis, int):
        raise CheckpointError(f"{where} is placed as {kind}; only Shard and Replicate can be merged.")
    return axis


def _of_sharded_tensor(where: str, value: StoredSharded) -> Piece:
    """FSDP1's older form: a list of local shards, each with its offsets, and metadata with the whole size."""
    try:
        shards, metadata = value.stored[0], value.stored[1]
        size = tuple(metadata.field("size"))
        dtype = metadata.field("tensor_properties").state[0]
        if not shards:
            return Piece(whole=StoredTensor(shape=size, dtype=dtype), tensor=None, axis=None, offsets=())
        (shard,) = shards
        tensor, offsets = shard.field("tensor"), tuple(shard.field("metadata").field("shard_offsets"))
        return Piece(
            whole=StoredTensor(shape=size, dtype=tensor.dtype), tensor=tensor, axis=None, offsets=offsets
        )
    except (TypeError, AttributeError, IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"{where} is a ShardedTensor of a form that is not known: {error}.") from error


def _placed(name: str, pieces: Sequence[Piece]) -> Tensor:
    """Pieces that say where they begin."""
    whole = pieces[0].whole
    by_place = {
        piece.offsets: piece.tensor
        for piece in pieces
        if piece.tensor is not None and piece.offsets is not None
    }
    if sum(tensor.numel() for tensor in by_place.values()) != whole.num_values:
        raise CheckpointError(f"the shards of {name} do not cover {whole}.")
    merged = torch.empty(whole.shape, dtype=whole.dtype)
    for offsets, tensor in by_place.items():
        place = tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))
        merged[place] = tensor
    return merged
