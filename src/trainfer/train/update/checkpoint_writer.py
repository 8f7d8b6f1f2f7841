"""Writes the shards of a distributed checkpoint as safetensors, straight from memory to disk.

Takes torch's save plan (which rank writes which part of which tensor); gives
``shard-R-model-I-of-N.safetensors``, which torch's ``HuggingFaceStorageReader`` reads on any number of ranks.
Staged, it copies them to host memory only, to be written later.
torch's own writer of this format first builds each file in memory, which takes several times as long, and
its headers differ from run to run; here equal states give equal files.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Header entry under which torch's reader finds where each shard begins in its tensor."""
OFFSETS_FIELD = "saved_offsets"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One file of a rank, in host memory."""

    path: Path
    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, Mapping[str, list[int]]]

    def write(self) -> None:
        """Write it and force it to disk.

        Raises:
            SafetensorError, OSError: it cannot be written.
        """
        save_file(dict(self.tensors), self.path, metadata={OFFSETS_KEY: json.dumps(self.offsets)})
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ShardWriter(HuggingFaceStorageWriter):
    """One rank's files; at most one of them is on its way from the GPU at a time."""

    def __init__(self, folder: Path, file_of: Mapping[str, int], *, staged: bool = False) -> None:
        """``file_of``: tensor name -> number of its file, from 1; ``staged``: keep the files in ``files`` instead of writing."""
        super().__init__(str(folder), fqn_to_index_mapping=dict(file_of), save_distributed=True)
        self._folder = folder
        self._file_of = file_of
        self._staged = staged
        self.files: list[ShardFile] = []
        """What is still to be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part and force it to disk.

        Raises:
            SafetensorError, OSError: a file cannot be written.
        """
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(self._file_of[item.index.fqn], []).append(item)
        for number, items in sorted(files.items()):
            file = self._file(number, items, planner)
            if self._staged:
                self.files.append(file)
            else:
                file.write()
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # the reader takes everything from the files themselves
        return done

    def _file(self, number: int, items: list[WriteItem], planner: SavePlanner) -> ShardFile:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), "only tensors are handed to the checkpoint"
            assert item.tensor_data is not None
            assert item.index.fqn not in tensors, "a rank holds one contiguous part of a tensor"
            tensors[item.index.fqn] = tensor.detach().to("cpu", copy=self._staged).contiguous()
            offsets[item.index.fqn] = {OFFSETS_FIELD: list(item.tensor_data.chunk.offsets)}
        rank = dist.get_rank() if dist.is_initialized() else 0
        total = max(self._file_of.values())
        path = self._folder / f"shard-{rank + 1:05d}-model-{number:05d}-of-{total:05d}.safetensors"
        return ShardFile(path=path, tensors=tensors, offsets=offsets)
