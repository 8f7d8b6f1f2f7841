"""What may be wrong, read off the error itself: numbers in, hypotheses out. NumPy only.

A fault leaves a shape in the error that follows from its maths: another eps scales a row by one number that depends on
the row's size alone; rotary tables of another frequency turn by an angle that grows with the position; a window touches
no row that it covers. Each function takes plain arrays of one place and gives the parameter that the shape implies, or
None where the error has not that shape. A trial (``trials``) then does it and looks whether the side's values come out.

Axes: R rows, D features, F rotary frequencies, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """One assumption about one side.

    Example: ``cause="norm.eps"``, ``parameters={"eps": 1e-5, "reference eps": 1e-6}``.
    """

    cause: str
    parameters: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])
    evidence: tuple[str, ...] = ()
    """What in the numbers speaks for it, beyond that it reproduces."""
    grid: bool = False
    """It puts values on a grid: one that lies between two of its points may go either way, so single rows may stay."""


def eps_of_rows(x_RD: Floats, y_RD: Floats, weight_D: Floats) -> tuple[float, float] | None:
    """The eps that an RMS norm used, from y = x · w / sqrt(mean x² + eps).

    A row's factor s = <y, xw> / <xw, xw> gives eps = 1/s² − mean x². Rows of small norm tell most, so the estimate is
    weighted by s⁴ (the inverse variance, the relative error of s being alike in all rows).

    Returns:
        (eps, the largest relative residual of a row outside the direction of xw); None where rows are no multiples.
    """
    xw = x_RD * weight_D
    size = np.einsum("rd,rd->r", xw, xw)
    usable = size > 0
    if not usable.any():
        return None
    scale = np.einsum("rd,rd->r", y_RD, xw)[usable] / size[usable]
    if not (scale > 0).all():
        return None
    off = y_RD[usable] - scale[:, None] * xw[usable]
    residual = np.linalg.norm(off, axis=1) / np.maximum(np.linalg.norm(y_RD[usable], axis=1), 1e-30)
    square = np.mean(np.square(x_RD[usable]), axis=1)
    eps = 1 / np.square(scale) - square
    weight = scale**4
    return float(np.sum(weight * eps) / np.sum(weight)), float(residual.max())


def eps_outside_of_rows(x_RD: Floats, y_RD: Floats, weight_D: Floats) -> float | None:
    """The eps of y = x · w / (sqrt(mean x²) + eps): 1/s − sqrt(mean x²) of each row, weighted by s² as above."""
    xw = x_RD * weight_D
    size = np.einsum("rd,rd->r", xw, xw)
    usable = size > 0
    scale = np.einsum("rd,rd->r", y_RD, xw)[usable] / size[usable]
    if not len(scale) or not (scale > 0).all():
        return None
    eps = 1 / scale - np.sqrt(np.mean(np.square(x_RD[usable]), axis=1))
    return float(np.sum(scale**2 * eps) / np.sum(scale**2))


ROUND_EPS = (1e-12, 1e-8, 1e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3, 1e-2, 0.1)
"""Values that people write."""


def round_eps(eps: float) -> list[float]:
    """What a fitted eps may have been meant to be: the nearest values that people write, then the fit itself."""
    if not eps > 0:
        return [0.0]
    near = sorted(ROUND_EPS, key=lambda value: abs(np.log(value / eps)))[:2]
    return [*near, eps]


def frequencies_of_rows(
    cos_RF: Floats, sin_RF: Floats, positions_R: NDArray[np.int64]
) -> tuple[Floats, float, float] | None:
    """Frequencies and factor behind rotary tables, from cos² + sin² and from angles that are linear in the position.

    The angle of the smallest position above 0 is known up to full turns; larger positions refine it as long as what
    is known predicts the turn.

    Returns:
        (frequencies ``[F]``, factor, largest deviation of a table element from cos/sin of the fit); None without a
        row at position 1 to 3.
    """
    radius = np.sqrt(np.square(cos_RF) + np.square(sin_RF))
    factor = float(np.median(radius))
    order = np.argsort(positions_R, kind="stable")
    order = order[positions_R[order] > 0]
    if factor <= 0 or not len(order) or positions_R[order[0]] > 3:
        return None
    angles = np.arctan2(sin_RF, cos_RF)
    first = order[0]
    frequencies = angles[first] / positions_R[first]
    for row in order[1:]:
        position = positions_R[row]
        guess = frequencies * position
        angle = angles[row] + 2 * np.pi * np.round((guess - angles[row]) / (2 * np.pi))
        frequencies = angle / position
    fitted = positions_R[:, None] * frequencies
    off = max(
        float(np.abs(factor * np.cos(fitted) - cos_RF).max(initial=0.0)),
        float(np.abs(factor * np.sin(fitted) - sin_RF).max(initial=0.0)),
    )
    return frequencies, factor, off


def positions_of_rows(cos_RF: Floats, sin_RF: Floats, frequencies_F: Floats, limit: int) -> NDArray[np.int64]:
    """The position whose tables each row holds: the nearest of 0 to ``limit``; −1 where none is near."""
    candidates = np.arange(limit + 1)
    angles = candidates[:, None] * frequencies_F
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    rows = np.concatenate([cos_RF, sin_RF], axis=1)
    rows = rows / np.maximum(np.sqrt(np.square(rows).sum(1, keepdims=True) / rows.shape[1] * 2), 1e-30)
    product = rows @ table.T
    best = product.argmax(1)
    near = product.max(1) > (1 - 1e-3) * rows.shape[1] / 2
    return np.where(near, best, -1)


def first_bad(error_T: Floats, floor: float) -> int | None:
    """The first position that is off."""
    off = np.flatnonzero(~(error_T <= floor))
    return int(off[0]) if len(off) else None


def common_factor(computed: Floats, captured: Floats) -> tuple[float, float]:
    """(c, relative residual) of captured ≈ c · computed."""
    size = float(np.vdot(computed, computed))
    factor = float(np.vdot(computed, captured)) / size if size > 0 else 1.0
    rest = float(np.linalg.norm(captured - factor * computed)) / max(float(np.linalg.norm(captured)), 1e-30)
    return factor, rest


def dropped(x: Floats, y: Floats, floor: float) -> tuple[float, float] | None:
    """(share of zeros, factor of the rest) where y is x with elements dropped; None where it is not."""
    live = np.abs(x) > 1e-6 * max(float(np.abs(x).max(initial=0.0)), 1e-30)
    ratio = y[live] / x[live]
    zero = ratio == 0
    if not zero.any() or zero.all():
        return None
    factor = float(np.median(ratio[~zero]))
    if np.abs(ratio[~zero] / factor - 1).max() > max(8 * floor, 1e-5):
        return None
    return float(zero.mean()), factor


def rank_one_scale(base: Floats, delta: Floats, captured: Floats) -> tuple[float, float]:
    """(c, relative residual) of captured ≈ base + c · delta: how often an adapter's part is in it."""
    factor, _ = common_factor(delta, captured - base)
    rest = captured - base - factor * delta
    return factor, float(np.linalg.norm(rest)) / max(float(np.linalg.norm(captured)), 1e-30)


def describe_ratio(ratios_F: Floats) -> str:
    """Frequencies against the reference's, in words."""
    low, high = float(ratios_F.min()), float(ratios_F.max())
    if abs(high / low - 1) < 1e-3:
        return f"all frequencies are {float(np.median(ratios_F)):.5g} times the reference's"
    logs = np.log(ratios_F)
    slope = np.polyfit(np.arange(len(logs)), logs, 1)
    if float(np.abs(np.polyval(slope, np.arange(len(logs))) - logs).max()) < 1e-3:
        return (
            f"another base: the frequencies' ratio falls evenly from {ratios_F[0]:.4g} to {ratios_F[-1]:.4g}"
        )
    return f"frequencies are {low:.4g} to {high:.4g} times the reference's, unevenly"
