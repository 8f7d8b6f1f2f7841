"""Distances in representable numbers.

Takes two tensors of one shape; gives the largest distance. Floats are read as whole numbers in their own order.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ULP_VIEWS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def ulp_max_of_parts(signs: NDArray[np.int32], x_abs: NDArray[np.int32], y_abs: NDArray[np.int32]) -> int:
    """As ``ulp_max``, of float32 values given as bits: x xor y (overwritten), |x| and |y|.

    Of unlike signs the distance is |x| + |y|, which is never less than their difference; so the larger of two
    maxima is taken, and the second only where signs differ.
    """
    between = np.subtract(x_abs, y_abs)
    largest = max(int(between.max()), -int(between.min()))
    if int(signs.min()) < 0:
        across = np.add(x_abs, y_abs, out=between)
        across &= np.right_shift(signs, 31, out=signs)
        largest = max(largest, int(across.view(np.uint32).max()))
    return largest


def ulp_max(x: Tensor, y: Tensor) -> int:
    """Largest number of representable steps between two elements; NaN left out, 0 for dtypes without steps."""
    if x.dtype != y.dtype:
        if not (x.is_floating_point() and y.is_floating_point()):
            return 0
        coarser = min((x.dtype, y.dtype), key=lambda dtype: -torch.finfo(dtype).eps)
        x, y = x.to(coarser), y.to(coarser)
    view = _ULP_VIEWS.get(x.dtype)
    if view is None or x.numel() == 0:
        return 0
    a, b = _ordered(x.contiguous().view(view)), _ordered(y.contiguous().view(view))
    steps = torch.maximum(a, b).sub_(torch.minimum(a, b))
    return int(steps.numpy().view(np.uint32).max())


def _ordered(bits: Tensor) -> Tensor:
    """Whole numbers in the order of the floats, one apart for neighbours; +0 and −0 are both 0.

    The distance of two of them fits 32 bits without sign, so that a wrapping difference is right.
    """
    mask = 0x7FFF if bits.dtype is torch.int16 else 0x7FFFFFFF
    bits = bits.int()
    signs = bits >> 31
    return signs.bitwise_and(mask).bitwise_xor_(bits).sub_(signs)
