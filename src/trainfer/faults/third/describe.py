"""Makes a ``Fault`` from a plant: its docstring is the summary.

Takes a name, a plant and a fault's other fields; gives the fault.
"""

import inspect
from typing import Any

from trainfer.faults.fault import Fault, Plant


def described(name: str, plant: Plant, **more: Any) -> Fault:
    """A fault that is described by its plant's docstring."""
    return Fault(name=name, plant=plant, summary=inspect.getdoc(plant) or "", **more)
