"""What to do about a cause: data (``fixes.json``)."""

from functools import cache
from importlib.resources import files

import msgspec


@cache
def _fixes() -> dict[str, str]:
    data = files("trainfer.check.explain").joinpath("fixes.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, str])


def fix_for(cause: str) -> str:
    """One sentence for one cause id."""
    return _fixes()[cause]
