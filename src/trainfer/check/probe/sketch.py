"""A small random projection of every row: rows can be compared without being stored.

Takes rows ``[slots, width]``; gives float32 ``[slots, SKETCH_WIDTH + 1]``: projections onto fixed vectors of
±1/√width (Johnson and Lindenstrauss; signs after Achlioptas 2003) and the row's L2 norm. The sums are taken in
float64 and rounded once, so equal rows give equal sketches whatever else is in the batch. No global random state.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from trainfer.check.dump.records import SKETCH_WIDTH

_PIECE_ELEMENTS = 1 << 20
"""Widened to float64 at a time: what stays in a cache."""
_DEVICE_PIECE_ELEMENTS = 1 << 25
"""The same on a device, where each piece costs launches."""


def sketch_rows(rows: Tensor) -> Tensor:
    """Sketch of ``[slots, width]`` rows of any real dtype, on their device."""
    slots, width = rows.shape
    sketch = torch.empty(slots, SKETCH_WIDTH + 1, dtype=torch.float32, device=rows.device)
    if not width:
        return sketch.zero_()
    directions = _directions_on(width, rows.device)
    elements = _PIECE_ELEMENTS if rows.device.type == "cpu" else _DEVICE_PIECE_ELEMENTS
    step = max(1, elements // width)
    for start in range(0, slots, step):
        piece = rows[start : start + step].double()
        sketch[start : start + step, :SKETCH_WIDTH] = piece @ directions
        sketch[start : start + step, SKETCH_WIDTH] = piece.square().sum(dim=1).sqrt()
    return sketch


@functools.lru_cache(maxsize=64)
def _directions_on(width: int, device: torch.device) -> Tensor:
    return _directions(width).to(device)


@functools.lru_cache(maxsize=64)
def _directions(width: int) -> Tensor:
    words = np.random.Philox(key=width).random_raw(-(-width * SKETCH_WIDTH // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: width * SKETCH_WIDTH]
    signs = 1.0 - 2.0 * bits.astype(np.float64)
    return torch.as_tensor(signs.reshape(width, SKETCH_WIDTH) / np.sqrt(width))
