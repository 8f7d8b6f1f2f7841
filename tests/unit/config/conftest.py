from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path):
    """Write a configuration and give its path."""

    def _write(text: str | bytes, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _write


@pytest.fixture
def minimal(write):
    return write("data:\n  train_files: train.parquet\nactor_rollout_ref:\n  model: {path: model}\n")
