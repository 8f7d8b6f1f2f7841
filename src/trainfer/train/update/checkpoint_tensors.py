"""Names, shapes and dtypes of stored tensors, compared before anything is overwritten.

Takes the listing of a checkpoint and the headers of its safetensors files; gives one error that names every
tensor that is missing, strange or of another shape or dtype. Reads headers only, no data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainfer.errors import CheckpointError

_SHOWN = 5
DTYPES_BY_NAME = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Global shape and dtype of a tensor, whatever its sharding."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "StoredTensor":
        """Of a plain tensor or a DTensor."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    @classmethod
    def from_json(cls, entry: object) -> "StoredTensor":
        """Inverse of ``to_json``.

        Raises:
            CheckpointError: not such an entry.
        """
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("shape"), list)
            and entry.get("dtype") in DTYPES_BY_NAME
        ):
            shape = entry["shape"]
            if all(isinstance(size, int) and size >= 0 for size in shape):
                return cls(shape=tuple(shape), dtype=DTYPES_BY_NAME[entry["dtype"]])
        raise CheckpointError(
            f"A tensor entry of the checkpoint is damaged: {str(entry)[:100]}. Use an older one."
        )

    @property
    def num_values(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, object]:
        """E.g. ``{"shape": [4, 2], "dtype": "torch.float32"}``."""
        return {"shape": list(self.shape), "dtype": str(self.dtype)}

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def stored_tensors(reader: HuggingFaceStorageReader, folder: Path) -> dict[str, StoredTensor]:
    """What the files really hold, put together from the shards.

    Raises:
        CheckpointError: a file's header is damaged, or shards do not cover their tensor (a file is missing).
    """
    try:
        entries = reader.read_metadata().state_dict_metadata
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"Cannot read the tensors of {folder}: {error}. Use an older checkpoint."
        ) from error
    found: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        assert isinstance(entry, TensorStorageMetadata)
        covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if covered != math.prod(entry.size):
            raise CheckpointError(
                f"The shards of {name} in {folder} hold {covered} of {math.prod(entry.size)} values: a file is "
                "missing or there twice. Use an older checkpoint."
            )
        found[name] = StoredTensor(shape=tuple(entry.size), dtype=entry.properties.dtype)
    return found


def check_tensors(
    wanted: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor], *, where: str
) -> None:
    """Raise unless both sides name the same tensors with the same shapes and dtypes.

    Raises:
        CheckpointError: names the first few differences of each kind.
    """
    problems = [
        _listing("are missing", [name for name in wanted if name not in found]),
        _listing("belong to another model", [name for name in found if name not in wanted]),
        _listing(
            "differ in shape or dtype",
            [
                f"{name} ({found[name]} instead of {entry})"
                for name, entry in wanted.items()
                if name in found and found[name] != entry
            ],
        ),
    ]
    named = [problem for problem in problems if problem]
    if named:
        raise CheckpointError(
            f"In {where} {'; '.join(named)}. Resume with the model, dtype and optimizer that were saved, "
            "or start in another folder."
        )


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor(s) {what}: {', '.join(names[:_SHOWN])}{more}"
