"""The model that two dumps are replayed with, from a folder.

Takes a folder with ``config.json`` and safetensors; gives the causal LM as Transformers computes it, on the CPU, in
the dtype in which it was saved. No code of the folder is run, nothing is downloaded, no pickle is opened.
"""

import json
from pathlib import Path

import torch
from torch import nn

from trainfer.integrations.transformers.load import load_model

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_reference(folder: Path | str) -> nn.Module:
    """The folder's model with stock attention.

    Raises:
        ModelError: the folder is missing or damaged, or holds no causal LM that Transformers knows.
    """
    path = Path(folder)
    return load_model(path, dtype=_saved_dtype(path), device="cpu", attention="eager")


def _saved_dtype(path: Path) -> torch.dtype:
    """As ``config.json`` says; float32 where it says nothing."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return torch.float32
    named = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    return _DTYPES.get(str(named), torch.float32)
