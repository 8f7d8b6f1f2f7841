"""The builtin engine on a CUDA device, half precision: prefill by the module, decode by graphs over a paged cache.

Takes and gives what ``builtin.engine`` does, whose scheduling, prefill and sampling it shares. Different are: pages of
at least ``gpu_attention.KEY_BLOCK`` tokens, decode in bursts of ``gpu_graphs.BURST`` steps without the host (tokens that
a sequence draws after its stop token within a burst are thrown away), and that cache and graphs outlive a
``load_weights``, which writes in place. While a hook watches the model, decode calls its modules step by step, with the
same bits.

Axes: B slots, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import numpy
import torch
from torch import Tensor, nn

from trainfer.engines.builtin.call import GenerateCall
from trainfer.engines.builtin.cpu_program import Decoder
from trainfer.engines.builtin.engine import BuiltinEngine
from trainfer.engines.builtin.gpu_graphs import BURST, Burst, DecodeGraphs, SlotTensors, bucket_of
from trainfer.engines.builtin.gpu_program import ModuleProgram, Program, SlotState, make_program
from trainfer.engines.builtin.kv_cache import PagedCache
from trainfer.engines.builtin.scheduler import DecodeStep, Tracked
from trainfer.engines.limits import EngineLimits
from trainfer.engines.module_mode import is_watched
from trainfer.exact.attention import round_up
from trainfer.exact.gpu_attention import KEY_BLOCK, supports
from trainfer.exact.logprobs import RowSampling, row_sampling
from trainfer.exact.packed import ROW_MULTIPLE, CausalModel
from trainfer.types import GenerationRequest

_SPARE = 1.25
"""A cache that must grow grows by this factor, since a new one costs new graphs."""

_TRIAL_SLOTS = 8


class _Config(Protocol):
    hidden_size: int
    num_attention_heads: int


def suits(model: nn.Module) -> bool:
    """Whether the engine's decode attention computes what the model asks for, by its config."""
    config = cast(_Config, vars(model)["config"])
    settings: dict[str, object] = vars(config)
    size = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    kinds = settings.get("layer_types")
    slides = "sliding_attention" in kinds if isinstance(kinds, list) else bool(settings.get("sliding_window"))
    capped = settings.get("attn_logit_softcapping") is not None
    dtype = next(model.parameters()).dtype
    return isinstance(size, int) and supports(dtype, size) and not slides and not capped


class GpuCall(GenerateCall):
    """As ``GenerateCall``, with decode in bursts."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        cache: PagedCache,
        requests: Sequence[GenerationRequest],
        max_num_seqs: int,
        decoder: Decoder,
        graphs: DecodeGraphs | None,
        watched: ModuleProgram,
    ) -> None:
        super().__init__(model, device, cache, requests, max_num_seqs, decoder)
        self._graphs = graphs
        self._watched = watched
        self._burst_sampling: tuple[tuple[Tracked, ...], RowSampling] | None = None

    def decode(self, step: DecodeStep) -> list[Tracked]:
        """Draw up to ``BURST`` tokens for each sequence."""
        if step.copies:
            self._cache.copy_blocks(step.copies)
        sequences = step.sequences
        if self._graphs is None:
            return self._draw(
                self._watched.logits(self._rows(sequences), self._cache)[: len(sequences)], sequences
            )
        limits = [self._requests[sequence.index].sampling.max_new_tokens for sequence in sequences]
        left = max(limit - len(s.sampled_ids) for limit, s in zip(limits, sequences, strict=True))
        tokens, logprobs = self._graphs.run(self._burst(sequences, min(BURST, left)))
        columns = zip(sequences, zip(*tokens, strict=True), zip(*logprobs, strict=True), strict=True)
        return [
            sequence
            for sequence, row_tokens, row_logprobs in columns
            if self._extend(sequence, row_tokens, row_logprobs)
        ]

    def _rows(self, sequences: Sequence[Tracked]) -> SlotState:
        """One decode step's rows, made anew; those that stand for nobody repeat a token and write to page 0."""
        num_idle = -len(sequences) % ROW_MULTIPLE
        ids = [sequence.last_token for sequence in sequences]
        table = torch.zeros(len(ids) + num_idle, max(len(s.blocks) for s in sequences), dtype=torch.int32)
        for row, sequence in zip(table, sequences, strict=False):
            row[: len(sequence.blocks)] = torch.tensor(sequence.blocks)
        positions = [sequence.length - 1 for sequence in sequences] + [0] * num_idle
        return SlotState(
            input_ids_B=torch.tensor(ids + ids[:1] * num_idle, device=self._device),
            positions_B=torch.tensor(positions, device=self._device),
            table=table.to(self._device),
        )

    def _burst(self, sequences: tuple[Tracked, ...], steps: int) -> Burst:
        uniforms = numpy.zeros((steps, len(sequences)))
        for column, sequence in enumerate(sequences):
            start = len(sequence.sampled_ids)
            numbers = self._uniforms[sequence.index][start : start + steps]
            uniforms[: len(numbers), column] = numbers
        if self._burst_sampling is None or self._burst_sampling[0] != sequences:
            params = [self._requests[sequence.index].sampling for sequence in sequences]
            self._burst_sampling = (sequences, row_sampling(params, [1] * len(params), device="cpu"))
        return Burst(
            input_ids=[sequence.last_token for sequence in sequences],
            positions=[sequence.length - 1 for sequence in sequences],
            blocks=[sequence.blocks for sequence in sequences],
            uniforms=uniforms,
            sampling=self._burst_sampling[1],
        )


class GpuEngine(BuiltinEngine):
    """See the module docstring."""

    def __init__(self, model: nn.Module, *, limits: EngineLimits, weights_version: int = 0) -> None:
        limits = dataclasses.replace(limits, block_size=round_up(limits.block_size, KEY_BLOCK))
        super().__init__(model, limits=limits, weights_version=weights_version)
        self._lookahead = BURST
        self._program: Program | None = None
        self._tensors: SlotTensors | None = None
        self._graphs: DecodeGraphs | None = None

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights in place; the cache's memory and the graphs stay, its contents are never read again.

        Raises:
            WeightSyncError: see ``BuiltinEngine.load_weights``.
        """
        cache = self._cache
        super().load_weights(named_tensors, version=version)
        self._cache = cache

    def close(self) -> None:
        """Free cache and graphs."""
        super().close()
        self._graphs = None

    @property
    def program(self) -> Program | None:
        """The decode forward, once a call has been made."""
        return self._program

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The captured decode steps, once a call has been made."""
        return self._graphs

    def _start(self, requests: Sequence[GenerationRequest], num_blocks: int) -> GenerateCall:
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._graphs = None
            grown = num_blocks if self._cache is None else int(num_blocks * _SPARE)
            self._cache = PagedCache(grown, self._limits.block_size)
        graphs = None if is_watched(self._model) else self._graphs_for(len(requests))
        return GpuCall(
            self._model,
            self._device,
            self._cache,
            requests,
            self._limits.max_num_seqs,
            self._decoder,
            graphs,
            ModuleProgram(self._model, self._max_positions),
        )

    def _graphs_for(self, num_requests: int) -> DecodeGraphs:
        """Graphs over the present cache, program and slots; made where there are none yet."""
        assert self._cache is not None
        slots = bucket_of(min(self._limits.max_num_seqs, num_requests))
        pages = -(-(self._max_positions + BURST) // self._limits.block_size)
        if self._tensors is None or self._tensors.slots < slots:
            self._tensors = SlotTensors(slots, pages, self._device)
            self._graphs = None
        if self._graphs is None:
            if self._program is None:
                self._program = make_program(
                    self._model,
                    max_positions=self._max_positions,
                    table_positions=pages * self._limits.block_size,
                    check=functools.partial(
                        self._trial_logits, PagedCache(2 * _TRIAL_SLOTS, self._limits.block_size)
                    ),
                )
            self._graphs = DecodeGraphs(self._program, self._cache, self._tensors)
        return self._graphs

    def _trial_logits(self, cache: PagedCache, program: Program) -> Tensor:
        """Logits of a few decode steps of some slots, some of them across a page's end."""
        size = self._limits.block_size
        starts = [0, 1, 7, 30, size - 2, size - 1, size, size + 30]
        generator = torch.Generator().manual_seed(0)
        steps = 4
        assert len(starts) == _TRIAL_SLOTS
        ids = torch.randint(self._vocab_size, (steps, len(starts)), generator=generator).to(self._device)
        state = SlotState(
            input_ids_B=ids[0].clone(),
            positions_B=torch.tensor(starts, device=self._device).clamp(
                max=max(0, self._max_positions - steps)
            ),
            table=torch.arange(1, 2 * _TRIAL_SLOTS + 1, dtype=torch.int32, device=self._device).view(-1, 2),
        )
        logits: list[Tensor] = []
        for step in range(steps):
            state.input_ids_B.copy_(ids[step])
            logits.append(program.logits(state, cache).clone())
            state.positions_B.add_(1)
        return torch.stack(logits)
