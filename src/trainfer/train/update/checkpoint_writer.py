"""Writes the shards of a distributed checkpoint as safetensors, straight from memory to disk.

Takes torch's save plan (which rank writes which part of which tensor); gives
``shard-R-model-I-of-N.safetensors``, which torch's ``HuggingFaceStorageReader`` reads on any number of ranks.
torch's own writer of this format first builds each file in memory, which takes several times as long, and
its headers differ from run to run; here equal states give equal files.
"""

import json
import os
from collections.abc import Mapping
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


class ShardWriter(HuggingFaceStorageWriter):
    """One rank's files; at most one of them is on its way from the GPU at a time."""

    def __init__(self, folder: Path, file_of: Mapping[str, int]) -> None:
        """``file_of``: tensor name -> number of its file, from 1."""
        super().__init__(str(folder), fqn_to_index_mapping=dict(file_of), save_distributed=True)
        self._folder = folder
        self._file_of = file_of

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part and force it to disk.

        Raises:
            SafetensorError, OSError: a file cannot be written.
        """
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(self._file_of[item.index.fqn], []).append(item)
        for number, items in sorted(files.items()):
            self._write_file(number, items, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # the reader takes everything from the files themselves
        return done

    def _write_file(self, number: int, items: list[WriteItem], planner: SavePlanner) -> None:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), "only tensors are handed to the checkpoint"
            assert item.tensor_data is not None
            assert item.index.fqn not in tensors, "a rank holds one contiguous part of a tensor"
            tensors[item.index.fqn] = tensor.detach().cpu().contiguous()
            offsets[item.index.fqn] = {OFFSETS_FIELD: list(item.tensor_data.chunk.offsets)}
        rank = dist.get_rank() if dist.is_initialized() else 0
        total = max(self._file_of.values())
        path = self._folder / f"shard-{rank + 1:05d}-model-{number:05d}-of-{total:05d}.safetensors"
        save_file(tensors, path, metadata={OFFSETS_KEY: json.dumps(offsets)})
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
