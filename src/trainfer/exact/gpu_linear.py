"""Matrix products of linear layers on a CUDA device whose rows have the same bits at every number of rows.

Takes rows and a weight; gives ``rows @ weight.T + bias``. The library's product is kept wherever it is row-invariant:
per weight shape, dtype and device it is compared, once, with itself at ``REFERENCE_ROWS`` rows, at every number of rows
that decode uses and at spots above. Where the library splits the inner axis (few rows, long inner axis), a Triton
product takes over that adds up the inner axis in order, as the library's unsplit kernels do; the fastest tile that
is bit for bit equal to the library's reference is chosen. If none equals it, the Triton product serves every number of
rows, which is row-invariant by itself.

Axes: M rows, N outputs, K inner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

jit = cast(Any, triton.jit)

REFERENCE_ROWS = 8192
_DENSE_TO = 512
"""Up to here every multiple of 8 is tried."""
_COLD_BYTES = 1 << 28
"""Timed with weights of so many bytes in turn, as in a model, whose layers push one another out of the cache."""
_SPOTS = (1, 2, 4, 12, 576, 640, 768, 1000, 1024, 1536, 2048, 3000, 4096, 6144)


class Tile(NamedTuple):
    """A Triton tile: rows, outputs and inner size of a step, warps and pipeline stages."""

    rows: int
    outputs: int
    inner: int
    warps: int
    stages: int


TILE_ROWS = 64
SMALL_TILES = (
    Tile(64, 16, 256, 4, 4),
    Tile(64, 16, 128, 4, 7),
    Tile(64, 32, 128, 4, 6),
    Tile(64, 32, 256, 4, 3),
    Tile(64, 64, 128, 4, 4),
)
LARGE_TILE = Tile(128, 256, 64, 8, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How products of one shape are computed."""

    tile: Tile | None
    """None: always by the library."""
    rows_to: int
    """The tile serves up to this many rows, the library above; -1 is any number."""
    unequal_rows: tuple[int, ...]
    """Numbers of rows tried at which the library's result differs from its result at ``REFERENCE_ROWS``."""
    microseconds: tuple[float, float] | None
    """Library and tile at 64 rows, where a tile was chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a route depends on."""

    outputs: int
    inner: int
    has_bias: bool
    dtype: torch.dtype
    device: int


ROUTES: dict[Shape, Route] = {}
"""Measured so far, by this process."""


@jit
def _kernel(rows, weight, bias, out, num_rows, outputs, inner, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            BIAS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BM)
    row = (tile % row_tiles) * BM
    output = (tile // row_tiles) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, inner, BK):
        acc = tl.dot(rows.load([row, k]), weight.load([output, k]).T, acc)
    if BIAS:
        column = output + tl.arange(0, BN)
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    out.store([row, output], acc.to(out.dtype))


def tile_product(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tile: Tile) -> Tensor:
    """``rows @ weight.T + bias``, the inner axis in order; no gradient."""
    rows_MK = rows_MK.contiguous()
    weight_NK = weight_NK.contiguous()
    (num_rows, inner), outputs = rows_MK.shape, weight_NK.shape[0]
    out = torch.empty(num_rows, outputs, dtype=rows_MK.dtype, device=rows_MK.device)
    _kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
        TensorDescriptor.from_tensor(rows_MK, [tile.rows, tile.inner]),
        TensorDescriptor.from_tensor(weight_NK, [tile.outputs, tile.inner]),
        rows_MK if bias_N is None else bias_N,
        TensorDescriptor.from_tensor(out, [tile.rows, tile.outputs]),
        num_rows, outputs, inner,
        BM=tile.rows, BN=tile.outputs, BK=tile.inner, BIAS=bias_N is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _fits_tile(shape: Shape) -> bool:
    """Descriptors want rows of a multiple of 16 bytes."""
    return shape.inner % 8 == 0 and shape.outputs % 8 == 0


def calibrate(shape: Shape, *, seed: int = 0) -> Route:
    """Measure one shape; see the module docstring."""
    device = torch.device("cuda", shape.device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(shape.dtype)

    rows, weight = random(REFERENCE_ROWS, shape.inner), random(shape.outputs, shape.inner) * shape.inner**-0.5
    bias = random(shape.outputs) if shape.has_bias else None
    reference = F.linear(rows, weight, bias)
    tried = sorted({*range(8, _DENSE_TO + 1, 8), *_SPOTS})
    unequal = tuple(n for n in tried if not torch.equal(F.linear(rows[:n], weight, bias), reference[:n]))
    if not unequal:
        return Route(tile=None, rows_to=0, unequal_rows=(), microseconds=None)
    if not _fits_tile(shape):
        return Route(tile=None, rows_to=0, unequal_rows=unequal, microseconds=None)
    rows_to = next((n for n in tried if n > unequal[-1]), REFERENCE_ROWS) - 1
    equal = [
        tile
        for tile in SMALL_TILES
        if all(
            torch.equal(tile_product(rows[:n], weight, bias, tile), reference[:n])
            for n in (1, 8, 72, 256, 512)
        )
    ]
    weights = [
        weight,
        *(weight.clone() for _ in range(_COLD_BYTES // (weight.numel() * weight.element_size()))),
    ]
    times = {
        tile: _microseconds(lambda w, tile=tile: tile_product(rows[:64], w, bias, tile), weights)
        for tile in (equal or [LARGE_TILE])
    }
    best = min(times, key=lambda tile: times[tile])
    library = _microseconds(lambda w: F.linear(rows[:64], w, bias), weights)
    return Route(
        tile=best,
        rows_to=rows_to if equal else -1,
        unequal_rows=unequal,
        microseconds=(library, times[best]),
    )


def _microseconds(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Median device time over weights that no cache holds together, from a graph so that the host does not matter."""
    for weight in weights[:2]:
        product(weight)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    times: list[float] = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(weights))
    return sorted(times)[len(times) // 2]


def route_of(weight: Tensor, *, has_bias: bool) -> Route:
    """The route of a weight's shape, measured when it is first asked for."""
    shape = Shape(
        outputs=weight.shape[0],
        inner=weight.shape[1],
        has_bias=has_bias,
        dtype=weight.dtype,
        device=weight.device.index,
    )
    if shape not in ROUTES:
        with torch.no_grad():
            ROUTES[shape] = calibrate(shape)
    return ROUTES[shape]


class _TileFunction(torch.autograd.Function):
    """The tile forward with the library's products backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return tile_product(rows, weight, bias, tile)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = grad_outputs
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if for_rows else None,
            gradient.t() @ rows if for_weight else None,
            gradient.sum(0) if for_bias else None,
            None,
        )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias``, ``[..., K]`` -> ``[..., N]``, by the shape's route, with autograd."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or rows.dtype != weight.dtype:
        return F.linear(rows, weight, bias)
    route = route_of(weight, has_bias=bias is not None)
    count = rows.numel() // rows.shape[-1]
    if route.tile is None or (route.rows_to >= 0 and count > route.rows_to):
        return F.linear(rows, weight, bias)
    flat = rows.reshape(count, rows.shape[-1])
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        out = _TileFunction.apply(flat, weight, bias, route.tile)
    else:
        out = tile_product(flat, weight, bias, route.tile)
    return out.view(*rows.shape[:-1], weight.shape[0])
