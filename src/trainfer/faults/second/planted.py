"""All faults and controls of the second generator.

Takes nothing; gives them by name. Names do not meet those of the first.
"""

from collections.abc import Mapping

from trainfer.faults.fault import Control, Fault
from trainfer.faults.second import (
    adapters,
    attention_backends,
    blocks,
    caches,
    data_path,
    heads,
    norms,
    positions,
    same,
    scoring,
    several,
    sync,
)

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for module in (
        data_path, sync, adapters, positions, attention_backends, norms, heads, caches, blocks, scoring, several,
    )
    for fault in module.FAULTS
}  # fmt: skip

CONTROLS: tuple[Control, ...] = same.CONTROLS
