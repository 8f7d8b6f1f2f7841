"""Which functions of verl are hooked, as data: one table for each version that is known.

Takes a version; gives its table. A row names a function by module and qualified name, and the advice that runs around it. Adding
a version is adding a module with ``TABLE`` and a line in ``TABLES``. No torch, nothing of verl.
"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One function that is hooked."""

    module: str
    """``verl.workers.engine_workers``."""
    name: str
    """``ActorRolloutRefWorker.update_actor``; the class must define the method itself."""
    advice: str
    """``package.module:function``: what runs around it (see ``wrapping.Advice``), loaded when the module has been imported."""
    what: str
    """For people: what happens there."""
    required: bool = True
    """False where a version's other mode lacks the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Everything that is hooked in one version of verl."""

    version: str
    vllm: tuple[str, ...]
    """Versions of vLLM that were run with it, as prefixes."""
    points: tuple[Point, ...]
    has_plugins: bool
    """True where verl loads the entry points ``verl.plugins``; else ``VERL_USE_EXTERNAL_MODULES`` is set."""


TABLES = {"0.9.1": "trainfer.integrations.verl.v091", "0.6.1": "trainfer.integrations.verl.v061"}
"""Version -> module that holds its ``TABLE``."""


def table_for(version: str) -> Table | None:
    """The table of a version of verl; None where it is not known."""
    name = TABLES.get(version)
    if name is None:
        return None
    table = importlib.import_module(name).TABLE
    assert isinstance(table, Table), f"{name}.TABLE is no table"
    return table
