"""Opens a side for comparison: its records, and its values as tensors.

Takes a folder written by ``trainfer.capture``; gives records (see ``align.side``) and verified tensors. Other
tools' dumps come through their integration as another ``ReadableSide``. No pickle, bounded memory: one tensor.
"""

from typing import Protocol

from torch import Tensor

from trainfer.check.align.side import Side
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import TensorRecord, WeightRecord
from trainfer.check.dump.tensors import load_tensor


class ReadableSide(Side, Protocol):
    """A side whose values can be read."""

    @property
    def name(self) -> str:
        """For messages: where it came from."""
        ...

    def load(self, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
        """The values of a record; raises ``DamagedRecordError``."""
        ...


class DumpSide(Dump):
    """A dump of trainfer's own format."""

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    def load(self, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
        """The values of a record.

        Raises:
            DamagedRecordError: its bytes are not whole, or it holds none.
        """
        return load_tensor(self, rank, record)
