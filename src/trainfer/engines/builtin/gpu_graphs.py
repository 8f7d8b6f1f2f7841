"""Decode steps on a CUDA device without the host: forward, draw and advance in one graph, replayed many times.

Takes a program and the cache; gives, for a number of slots and a kind of sampling, a graph whose replay draws one token
a slot, feeds it to the next replay, and writes token and log-prob into a row of a table that the host reads
once a burst. What the graphs read lies in ``SlotTensors``, allocated once; parameters and cache are read where they
are, so weights that are written in place, and caches that are filled anew, need no new capture.

Axes: B slots, V vocabulary, S steps of a burst.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray

from trainfer.engines.builtin.gpu_program import Program, SlotState
from trainfer.engines.builtin.kv_cache import PagedCache
from trainfer.engines.builtin.sampler import draw
from trainfer.exact.logprobs import RowSampling

BURST = 16
"""Decode steps between two looks of the host."""
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of slots that have a graph of their own; above, multiples of 128."""


def bucket_of(count: int) -> int:
    """The smallest number of slots with a graph that holds ``count``."""
    return next((size for size in BUCKETS if size >= count), -(-count // 128) * 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """One burst, from the host."""

    input_ids: Sequence[int]
    """The last token of each sequence."""
    positions: Sequence[int]
    blocks: Sequence[Sequence[int]]
    """Pages of each sequence, those of the burst's own tokens included."""
    uniforms: NDArray[numpy.float64]
    """``[S, sequences]``."""
    sampling: RowSampling
    """On the host."""


class SlotTensors:
    """Everything that a graph reads and writes, for up to ``slots`` sequences."""

    def __init__(self, slots: int, pages: int, device: torch.device) -> None:
        self.slots = slots
        self.state = SlotState(
            input_ids_B=torch.zeros(slots, dtype=torch.int64, device=device),
            positions_B=torch.zeros(slots, dtype=torch.int64, device=device),
            table=torch.zeros(slots, pages, dtype=torch.int32, device=device),
        )
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(BURST, slots, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(BURST, slots, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(BURST, slots, dtype=torch.float32, device=device)
        self.temperatures = torch.ones(slots, dtype=torch.float32, device=device)
        self.top_ks = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.top_ps = torch.ones(slots, dtype=torch.float64, device=device)
        self.min_ps = torch.zeros(slots, dtype=torch.float32, device=device)

    def view(self, slots: int) -> SlotState:
        """State of the first slots."""
        state = self.state
        return SlotState(
            input_ids_B=state.input_ids_B[:slots],
            positions_B=state.positions_B[:slots],
            table=state.table[:slots],
        )

    def sampling(self, slots: int, *, filters: bool, greedy: bool) -> RowSampling:
        """Sampling parameters of the first slots."""
        return RowSampling(
            temperatures_S=self.temperatures[:slots],
            top_ks_S=self.top_ks[:slots],
            top_ps_S=self.top_ps[:slots],
            min_ps_S=self.min_ps[:slots],
            filters=filters,
            greedy=greedy,
        )

    def park(self) -> None:
        """Let every slot write where nobody reads."""
        for tensor in (self.state.input_ids_B, self.state.positions_B, self.state.table, self.step):
            tensor.zero_()

    def load(self, burst: Burst, slots: int) -> None:
        """Take over a burst; slots beyond its sequences stand for nobody."""
        count = len(burst.input_ids)
        table = numpy.zeros((slots, self.state.table.shape[1]), dtype=numpy.int32)
        for row, blocks in zip(table, burst.blocks, strict=False):
            row[: len(blocks)] = blocks
        columns = torch.zeros(2, slots, dtype=torch.int64)
        columns[0, :count] = torch.tensor(burst.input_ids)
        columns[1, :count] = torch.tensor(burst.positions)
        self.state.table[:slots].copy_(torch.from_numpy(table))
        self.state.input_ids_B[:slots].copy_(columns[0])
        self.state.positions_B[:slots].copy_(columns[1])
        steps = burst.uniforms.shape[0]
        self.uniforms[:steps, :count].copy_(torch.from_numpy(burst.uniforms))
        self.temperatures[:count].copy_(burst.sampling.temperatures_S)
        self.top_ks[:count].copy_(burst.sampling.top_ks_S)
        self.top_ps[:count].copy_(burst.sampling.top_ps_S)
        self.min_ps[:count].copy_(burst.sampling.min_ps_S)
        self.step.zero_()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    slots: int
    filters: bool
    greedy: bool


class DecodeGraphs:
    """Graphs by number of slots and kind of sampling, captured when first asked for."""

    def __init__(self, program: Program, cache: PagedCache, tensors: SlotTensors) -> None:
        self._program = program
        self._cache = cache
        self._tensors = tensors
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, burst: Burst) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs ``[steps][sequences]`` of a burst."""
        count, steps = len(burst.input_ids), burst.uniforms.shape[0]
        kind = self._kind_of(burst)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(kind)
        self._tensors.load(burst, kind.slots)
        graph = self._graphs[kind]
        for _ in range(steps):
            graph.replay()
        return (
            self._tensors.tokens[:steps, :count].tolist(),
            self._tensors.logprobs[:steps, :count].tolist(),
        )

    def _kind_of(self, burst: Burst) -> _Kind:
        return _Kind(
            slots=bucket_of(len(burst.input_ids)),
            filters=burst.sampling.filters,
            greedy=burst.sampling.greedy,
        )

    def device_milliseconds(self, burst: Burst, repeats: int) -> float:
        """Device time of a decode step after ``burst`` was run, median of ``repeats`` bursts; for benchmarks.

        The burst's blocks must reach as far as its own tokens: each repeat starts from it anew.
        """
        kind = self._kind_of(burst)
        self.run(burst)
        times: list[float] = []
        steps = burst.uniforms.shape[0]
        for _ in range(repeats):
            self._tensors.load(burst, kind.slots)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(steps):
                self._graphs[kind].replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / steps)
        return statistics.median(times)

    def _capture(self, kind: _Kind) -> torch.cuda.CUDAGraph:
        self._tensors.park()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and shapes calibrated outside the capture
            self._step(kind)
            self._tensors.park()
            self._step(kind)
        torch.cuda.current_stream().wait_stream(stream)
        self._tensors.park()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(kind)
        self._tensors.park()
        return graph

    def _step(self, kind: _Kind) -> None:
        """One decode step of the first slots."""
        tensors, slots = self._tensors, kind.slots
        state = tensors.view(slots)
        logits_BV = self._program.logits(state, self._cache)
        uniforms_B = tensors.uniforms.index_select(0, tensors.step)[0, :slots]
        sampling = tensors.sampling(slots, filters=kind.filters, greedy=kind.greedy)
        drawn = draw(logits_BV, uniforms_B, sampling)
        tensors.tokens[:, :slots].index_copy_(0, tensors.step, drawn.tokens_B[None])
        tensors.logprobs[:, :slots].index_copy_(0, tensors.step, drawn.logprobs_B[None])
        state.input_ids_B.copy_(drawn.tokens_B)
        state.positions_B.add_(1)
        tensors.step.add_(1)
