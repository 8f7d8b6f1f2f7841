"""How far apart computations are that have the same maths: measured on a side's own rows, in its own dtype.

Takes a module and a sample of the rows that a side captured; runs it as the side might have run it (other batch
shapes, the sum in other orders and in parts, another attention backend, rows that do not lie together in memory) and
gives the largest relative L2 error of a row against float64, times ``SAFETY``. Deterministic.
"""
# pyright: standard
# (torch's own types are partial)

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from trainfer.check.replay.execute import OUTPUT, Manner, Prepared, SideExecutor
from trainfer.check.replay.rows import Addresses

SAFETY = 3.0
"""The factor between the largest error seen in the sample and the noise floor."""
SAME = 1e-9
"""Relative error of a row in float64 below which two computations have the same maths."""
SAMPLE_ROWS = 48
SAMPLE_SEQUENCES = 2
SINGLE_ROWS = 2
UNIT = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8 / 2}
"""Half the distance of 1 and the next number: no floor is below the rounding of the result itself."""


def sample_of(addresses: Addresses, *, whole_sequences: bool) -> Addresses:
    """Rows spread evenly over those at hand; of attention the last rows of the longest sequences."""
    if not whole_sequences:
        places = np.unique(np.linspace(0, len(addresses) - 1, min(SAMPLE_ROWS, len(addresses))).astype(int))
        return addresses.take(places)
    names = addresses.ranks << 40 | addresses.sequences
    distinct, inverse = np.unique(names, return_inverse=True)
    longest = [int(addresses.positions[inverse == n].max()) for n in range(len(distinct))]
    chosen = np.argsort(longest, kind="stable")[-SAMPLE_SEQUENCES:]
    places = np.flatnonzero(np.isin(inverse.reshape(-1), chosen))
    keep = np.unique(np.linspace(0, len(places) - 1, min(SAMPLE_ROWS, len(places))).astype(int))
    return addresses.take(places[keep])


def measure(
    executor: SideExecutor,
    name: str,
    prepared: Prepared,
    sample: Addresses,
    manner: Manner,
    *,
    every_variant: bool,
) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Place -> (largest relative error of a row times ``SAFETY``, the variants that were run).

    Args:
        executor: Runs modules on one side's rows.
        name: The module.
        prepared: What was found out about it.
        sample: The rows.
        manner: How the side ran it.
        every_variant: False runs it once, as the model computes.

    Raises:
        MissingRowsError: an input was not captured.
    """
    exact = executor.run(name, prepared, sample, Manner())
    native = replace(manner, wide=False)
    worst: dict[str, float] = dict.fromkeys(exact, 0.0)
    variants: list[str] = []
    for label, rows, found in _variants(executor, name, prepared, sample, native):
        variants.append(label)
        for place, values in found.items():
            if place in exact:
                errors = row_errors(values, exact[place][torch.from_numpy(rows)])
                worst[place] = max(worst[place], float(errors.max(initial=0.0)))
        if not every_variant:
            break
    return {place: (SAFETY * value, tuple(variants)) for place, value in worst.items()}


def row_errors(values: Tensor, exact: Tensor) -> NDArray[np.float64]:
    """Relative L2 error of each row."""
    scale = exact.double().norm(dim=1).clamp(min=1e-300)
    return ((values.double() - exact.double()).norm(dim=1) / scale).cpu().numpy()


Found = tuple[str, NDArray[np.int64], dict[str, Tensor]]


def _variants(
    executor: SideExecutor, name: str, prepared: Prepared, sample: Addresses, native: Manner
) -> Iterator[Found]:
    """(what was varied, which rows of the sample, place -> values)."""
    every = np.arange(len(sample))
    yield "all rows together", every, executor.run(name, prepared, sample, native)
    if prepared.whole_sequences:
        if _is_same_maths(executor, name, prepared, sample, attention="sdpa"):
            backend = replace(native, attention="sdpa")
            yield "attention by sdpa", every, executor.run(name, prepared, sample, backend)
        ordered = np.argsort(sample.positions, kind="stable")
        half = np.sort(ordered[: max(1, len(ordered) // 2)])
        yield "shorter sequences", half, executor.run(name, prepared, sample.take(half), native)
        return
    for size, label in ((1, "one row at a time"), (2, "two rows at a time")):
        places = every[: SINGLE_ROWS - SINGLE_ROWS % size] if len(every) >= size else every[:0]
        for start in range(0, len(places) - size + 1, size):
            some = places[start : start + size]
            yield label if start == 0 else "", some, executor.run(name, prepared, sample.take(some), native)
    module = executor.reference.modules[name]
    if isinstance(module, nn.Linear):
        yield from _linear_variants(executor, name, sample, native, every)


def _is_same_maths(
    executor: SideExecutor, name: str, prepared: Prepared, sample: Addresses, *, attention: str
) -> bool:
    """In float64 another backend gives the same: one that leaves out a soft-cap or a sink does not."""
    exact = executor.run(name, prepared, sample, Manner())
    try:
        other = executor.run(name, prepared, sample, Manner(attention=attention))
    except (RuntimeError, ValueError, NotImplementedError):
        return False  # the backend refuses this module
    return all(row_errors(other[place], exact[place]).max(initial=0.0) < SAME for place in exact)


def _linear_variants(
    executor: SideExecutor, name: str, sample: Addresses, native: Manner, every: NDArray[np.int64]
) -> Iterator[Found]:
    """One product with its sum cut in parts, in another order, and from memory that does not lie together."""
    module = executor.reference.modules[name]
    assert isinstance(module, nn.Linear)
    rows = executor.input_rows(name, sample)
    weight = executor.weights.tensor(f"{name}.weight", module.weight.detach())
    bias = None
    if module.bias is not None:
        bias = executor.weights.tensor(f"{name}.bias", module.bias.detach())
    if native.autocast is not None:
        rows, weight = rows.to(native.autocast), weight.to(native.autocast)
        bias = None if bias is None else bias.to(native.autocast)
    if rows.dtype != weight.dtype:
        return
    width = rows.shape[1]
    for count in (2, 4):
        if width >= 2 * count:
            yield f"the sum in {count} parts", every, {OUTPUT: _in_parts(rows, weight, bias, count)}
    order = torch.from_numpy(np.random.default_rng(0).permutation(width)).to(rows.device)
    yield "the sum in another order", every, {OUTPUT: F.linear(rows[:, order], weight[:, order], bias)}
    apart = torch.stack([rows, rows], dim=2)[:, :, 0]
    yield "rows apart in memory", every, {OUTPUT: F.linear(apart, weight, bias)}


def _in_parts(rows: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Partial products added in float32, as split kernels do, and rounded once."""
    pieces = zip(rows.chunk(count, dim=1), weight.chunk(count, dim=1), strict=True)
    total = torch.zeros((), device=rows.device)
    for part, columns in pieces:
        total = total + F.linear(part.float(), columns.float())
    if bias is not None:
        total = total + bias.float()
    return total.to(rows.dtype)
