"""State of every random generator of this process, as JSON: Python, NumPy, torch CPU, torch CUDA (current device).

trainfer draws its tokens from a seed per sequence and needs none of these; a model with dropout, or a
reward function that draws, does.
"""

import base64
import json
import random
from pathlib import Path

import numpy as np
import torch

from trainfer.errors import CheckpointError

SCHEMA = "trainfer.rng/1"


def rng_file(folder: Path, rank: int) -> Path:
    """Where the state of a rank is."""
    return folder / f"rng_rank_{rank}.json"


def rng_text() -> str:
    """The state of all generators of this process, as it stands in ``rng_rank_R.json``."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "schema": SCHEMA,
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch_cpu": _to_text(torch.get_rng_state()),
        "torch_cuda": _to_text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }
    return json.dumps(state)


def load_rng_state(folder: Path, rank: int) -> bool:
    """Restore all generators of this process; False when the checkpoint has none for this rank.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = rng_file(folder, rank)
    if not path.is_file():
        return False
    try:
        state = json.loads(path.read_bytes())
        if state["schema"] != SCHEMA:
            raise CheckpointError(f"{path} is not of the form {SCHEMA}.")
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_from_text(state["torch_cpu"]))
        if state["torch_cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_from_text(state["torch_cuda"]))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Use an older checkpoint.") from error
    return True


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
