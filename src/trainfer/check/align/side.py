"""What the comparison needs of one side, whoever wrote the dump.

``trainfer.check.dump.reader.Dump`` fulfils it, and so do the readers of other tools' dumps. Values
are read elsewhere (``compare.source``): this room only describes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from trainfer.check.dump.records import (
    CallRecord,
    Manifest,
    RowsRecord,
    SequenceRecord,
    TensorRecord,
    WeightRecord,
)


class Side(Protocol):
    """One side's records, read lazily."""

    @property
    def manifest(self) -> Manifest:
        """The lowest rank's."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that wrote something."""
        ...

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have written and did not."""
        ...

    @property
    def problems(self) -> tuple[str, ...]:
        """Damage met so far."""
        ...

    def tensors(
        self, rank: int, *, keep: Callable[[TensorRecord], bool] | None = None
    ) -> Iterator[TensorRecord]:
        """Tensor records in the order of execution."""
        ...

    def calls(self, rank: int) -> Mapping[int, CallRecord]:
        """Forward calls by number."""
        ...

    def row_tables(self, rank: int) -> Mapping[int, RowsRecord]:
        """Row tables by number."""
        ...

    def rows(self, rank: int, record: RowsRecord) -> np.ndarray:
        """One row table, ``dump.reader.ROW_TYPE`` per slot; raises ``DamagedRecordError``."""
        ...

    def sequences(self, rank: int) -> Iterator[SequenceRecord]:
        """Recorded sequences."""
        ...

    def weights(self, rank: int) -> Iterator[WeightRecord]:
        """Fingerprints of parameters and buffers."""
        ...
