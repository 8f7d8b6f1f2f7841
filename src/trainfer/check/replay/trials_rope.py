"""Assumptions about rotary tables: other positions, another precision, other frequencies.

Takes a site of kind ``rotary`` (cos and sin side by side); gives attempts. Tables are cos and sin of position times
frequency, times one factor: wrong positions repeat another row of the right table, a low precision leaves its grid, wrong
frequencies turn by an angle that grows with the position and is zero at position 0.

Axes: T tokens, R features of a table, F = R / 2 frequencies.
"""
# pyright: standard

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from trainfer.check.replay.hypotheses import (
    Hypothesis,
    describe_ratio,
    frequencies_of_rows,
    positions_of_rows,
)
from trainfer.check.replay.trials_sites import LOW_DTYPES, Attempt, Site, rounded

_MAX_OFFSET = 4096


def rope_attempts(site: Site) -> Iterator[Attempt]:
    """What may be otherwise in rotary tables."""
    inverse = getattr(site.layer, "inv_freq", None)
    if not isinstance(inverse, Tensor) or not site.usable():
        return
    factor = float(getattr(site.layer, "attention_scaling", 1.0))
    frequencies = inverse.detach().double()
    yield from _positions(site, frequencies, factor)
    yield from _layout(site, frequencies, factor)
    yield from _precision(site, frequencies, factor)
    yield from _scaling(site, frequencies, factor)


def learned_attempts(site: Site) -> Iterator[Attempt]:
    """Rows of a learned position embedding that are those of other positions."""
    weight = getattr(site.layer, "weight", None)
    if not isinstance(weight, Tensor) or not site.usable():
        return
    predicted: list[Tensor] = []
    moved: dict[int, int] = {}
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        computed, captured, known = rows
        table = weight.detach().double()
        right = torch.cdist(computed, table).argmin(1)
        found = torch.where(known, torch.cdist(captured, table).argmin(1), right)
        for offset in (found - right)[known].tolist():
            moved[offset] = moved.get(offset, 0) + 1
        predicted.append(table[found])
    yield from _other_positions(moved, tuple(predicted))


def tables(positions_T: Tensor, frequencies_F: Tensor, factor: float) -> Tensor:
    """Cos and sin side by side, ``[T, 2·R]``, angles in float32 as engines compute them."""
    angles = (positions_T.float()[:, None] * frequencies_F.float()).double()
    angles = torch.cat([angles, angles], dim=1)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * factor


def _each(site: Site, function: Callable[[int], Tensor]) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        found.append(function(len(rows[0])))
    return tuple(found)


def _halves(table: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of each frequency once."""
    cos, sin = table.chunk(2, dim=1)
    return cos[:, : cos.shape[1] // 2], sin[:, : sin.shape[1] // 2]


def _positions(site: Site, frequencies: Tensor, factor: float) -> Iterator[Attempt]:
    predicted: list[Tensor] = []
    moved: dict[int, int] = {}
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        _, captured, known = rows
        cos, sin = _halves(captured)
        limit = min(2 * len(captured) + _MAX_OFFSET, 1 << 16)
        found = positions_of_rows(cos.numpy(), sin.numpy(), frequencies.numpy(), limit)
        own = np.arange(len(captured))
        found = np.where(known.numpy() & (found >= 0), found, own)
        for offset, count in zip(*np.unique((found - own)[known.numpy()], return_counts=True), strict=True):
            moved[int(offset)] = moved.get(int(offset), 0) + int(count)
        predicted.append(tables(torch.from_numpy(found), frequencies, factor))
    yield from _other_positions(moved, tuple(predicted))


def _other_positions(moved: dict[int, int], predicted: tuple[Tensor, ...]) -> Iterator[Attempt]:
    """``moved``: positions off -> rows."""
    offsets = {offset: count for offset, count in moved.items() if offset}
    if not offsets:
        return
    listed = ", ".join(f"{count} rows by {offset:+d}" for offset, count in sorted(offsets.items())[:4])
    evidence = (f"the tables are those of other positions: {listed}; {moved.get(0, 0)} rows are right",)
    common = max(offsets, key=lambda offset: offsets[offset])
    yield Attempt(
        hypothesis=Hypothesis(
            cause="rope.positions", parameters={"offset": float(common)}, evidence=evidence
        ),
        predicted=predicted,
    )


def _layout(site: Site, frequencies: Tensor, factor: float) -> Iterator[Attempt]:
    def interleaved(count: int) -> Tensor:
        return torch.cat(
            [
                table[:, : table.shape[1] // 2].repeat_interleave(2, dim=1)
                for table in tables(torch.arange(count), frequencies, factor).chunk(2, dim=1)
            ],
            dim=1,
        )

    text = "each frequency stands twice in a row, in the reference the list of frequencies stands twice"
    yield Attempt(
        hypothesis=Hypothesis(cause="rope.layout", parameters={"layout": "interleaved"}, evidence=(text,)),
        predicted=_each(site, interleaved),
    )


def _precision(site: Site, frequencies: Tensor, factor: float) -> Iterator[Attempt]:
    for name, dtype in LOW_DTYPES.items():
        variants: dict[str, Callable[[int], Tensor]] = {
            "frequencies": lambda n, d=dtype: tables(torch.arange(n), rounded(frequencies, d), factor),
            "the finished tables": lambda n, d=dtype: rounded(tables(torch.arange(n), frequencies, factor), d),
            "angles": lambda n, d=dtype: _from_angles(
                rounded(torch.arange(n).double()[:, None] * frequencies, d), factor
            ),
            "positions, frequencies and angles": lambda n, d=dtype: _from_angles(
                rounded(rounded(torch.arange(n), d)[:, None] * rounded(frequencies, d), d), factor
            ),
            "frequencies and tables": lambda n, d=dtype: rounded(
                tables(torch.arange(n), rounded(frequencies, d), factor), d
            ),
            "positions": lambda n, d=dtype: tables(rounded(torch.arange(n), d), frequencies, factor),
        }  # fmt: skip
        for what, function in variants.items():
            text = f"{what} are rounded to {name}: an angle is off by up to {_unit(dtype):.2g} of itself"
            yield Attempt(
                hypothesis=Hypothesis(
                    cause="rope.dtype", grid=True, parameters={"dtype": name, "what": what}, evidence=(text,)
                ),
                predicted=_each(site, function),
            )


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _from_angles(angles_TF: Tensor, factor: float) -> Tensor:
    angles = torch.cat([angles_TF, angles_TF], dim=1)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * factor


def _scaling(site: Site, frequencies: Tensor, factor: float) -> Iterator[Attempt]:
    cosines, sines, positions = [], [], []
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        _, captured, known = rows
        cos, sin = _halves(captured[known])
        cosines.append(cos.numpy())
        sines.append(sin.numpy())
        positions.append(torch.arange(len(known))[known].numpy())
    fit = frequencies_of_rows(np.concatenate(cosines), np.concatenate(sines), np.concatenate(positions))
    if fit is None:
        return
    fitted, other, off = fit
    ratio = fitted / frequencies.numpy()
    parts: list[str] = []
    if np.abs(ratio - 1).max() > 1e-5 and (ratio > 0).all():
        parts.append(describe_ratio(ratio))
    if abs(other / factor - 1) > 1e-5:
        parts.append(f"cos and sin are multiplied by {other:.5g}, in the reference by {factor:.5g}")
    if not parts:
        return
    parts.append(f"one set of frequencies explains all rows (largest deviation of a table element {off:.2g})")
    yield Attempt(
        hypothesis=Hypothesis(
            cause="rope.scaling",
            parameters={"factor": other, "frequency_ratio": float(np.median(ratio))},
            evidence=tuple(parts),
        ),
        predicted=_each(site, lambda n: tables(torch.arange(n), torch.from_numpy(fitted), other)),
    )
