"""What the probe's tests share."""

from pathlib import Path

import pytest
from tiny_models import CONFIGS


@pytest.fixture(params=list(CONFIGS))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def dump_folder(tmp_path: Path) -> Path:
    return tmp_path / "dump"
