"""Fixtures of the comparison's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from dump_by_hand import SideContent, write


@pytest.fixture
def write_side(tmp_path: Path) -> Callable[[str, SideContent], Path]:
    return lambda name, content: write(tmp_path / name, content)
