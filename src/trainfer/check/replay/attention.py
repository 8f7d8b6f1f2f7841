"""Rows that attend to others: whole sequences, put together from whichever calls computed them.

Takes addresses of rows; gives the sequences that they belong to, and the mask that a module's configuration
prescribes. A row's keys and values are those of all rows before it, from prefill or decode alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainfer.check.replay.rows import Addresses, Ints, SideRows


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRows:
    """One sequence of one side."""

    rows: Addresses
    """Positions 0 to the last one that is asked for."""
    asked: Ints
    """Places among the addresses that were handed in."""
    positions: Ints
    """Of each of them."""


def sequences_of(rows: SideRows, addresses: Addresses) -> Iterator[SequenceRows]:
    """The sequences behind some rows, one at a time.

    Raises:
        MissingRowsError: rows before one of them were never captured.
    """
    pairs = np.stack([addresses.ranks, addresses.sequences], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    for number, (rank, sequence) in enumerate(distinct.tolist()):
        asked = np.flatnonzero(inverse == number)
        positions = addresses.positions[asked]
        yield SequenceRows(
            rows=rows.sequence_rows(rank, sequence, int(positions.max())), asked=asked, positions=positions
        )


def causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[1, 1, length, length]``, 0 where query i sees key j (j <= i, and i − j < window), else the dtype's lowest."""
    query, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (query - key >= window)
    mask = torch.zeros(length, length, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
