"""The builtin rollout engine: the Transformers module itself, with continuous batching and a paged cache.

Takes a built causal LM whose attention is ``exact.attention``; implements ``train.rollout.engine.Engine``.
Prefill is the packed forward of the trainer, decode one row a slot in the same row axis; both go through the
model's own forward, so trainer and engine share one definition of the model. Loads nothing by name, never
tokenises.

Axes: T rows, B slots, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from trainfer.engines.builtin.call import GenerateCall
from trainfer.engines.builtin.cpu_program import Decoder
from trainfer.engines.builtin.kv_cache import PagedCache
from trainfer.engines.builtin.scheduler import PrefillStep, Scheduler
from trainfer.engines.limits import EngineLimits
from trainfer.engines.module_mode import evaluating
from trainfer.engines.module_weights import copy_weights, fingerprints
from trainfer.engines.requests import check_requests
from trainfer.errors import EngineError
from trainfer.types import Completion, GenerationRequest


class _Config(Protocol):
    """What the engine reads from a model's config."""

    vocab_size: int
    max_position_embeddings: int


def _sizes_of(model: nn.Module) -> tuple[int, int]:
    """Vocabulary and positions."""
    config = cast(_Config, vars(model).get("config"))
    try:
        return config.vocab_size, config.max_position_embeddings
    except AttributeError as error:
        raise EngineError(
            f"{type(model).__name__} has no config with vocab_size and max_position_embeddings; the builtin engine "
            "needs a causal LM of Transformers"
        ) from error


class BuiltinEngine:
    """See the module docstring.

    Args:
        model: A causal LM of Transformers with trainfer's attention. The engine computes with this very
            module: ``load_weights`` writes into it.
        limits: See ``EngineLimits``.
        weights_version: Optimizer steps behind the module's weights.
    """

    def __init__(self, model: nn.Module, *, limits: EngineLimits, weights_version: int = 0) -> None:
        self._model = model
        self._vocab_size, self._max_positions = _sizes_of(model)
        self._device = next(model.parameters()).device
        self._limits = limits
        self._weights_version = weights_version
        self._is_complete = True
        self._cache: PagedCache | None = None
        self._decoder = Decoder(model, self._max_positions)
        self._lookahead = 1
        """Tokens that a decode step draws for each sequence before the host looks at them."""
        self.num_preemptions = 0
        """Of the last call."""

    @property
    def module(self) -> nn.Module:
        """What it computes with."""
        return self._model

    @property
    def weights_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return self._weights_version

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights in place and drop the cache.

        Raises:
            WeightSyncError: Unknown, missing or mis-shaped names; the engine then refuses to sample until a
                whole set has arrived.
        """
        self._is_complete = False
        self._cache = None
        copy_weights(self._model, named_tensors)
        self._decoder.weights_changed()
        self._is_complete = True
        self._weights_version = version

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of all parameters and buffers, tied names included."""
        return fingerprints(self._model)

    def close(self) -> None:
        """Free the cache."""
        self._cache = None

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Sample every request; see ``Engine``.

        Raises:
            EngineError: A request cannot be sampled (nothing was computed then), the last ``load_weights``
                failed, or the model gives logits that are not numbers.
        """
        if not self._is_complete:
            raise EngineError(
                "the engine holds a partial set of weights, because the last load_weights failed; send them again"
            )
        check_requests(
            requests,
            vocab_size=self._vocab_size,
            max_positions=self._max_positions,
            cache_tokens=self._cache_tokens(),
        )
        if not requests:
            return []
        with evaluating(self._model), torch.no_grad():
            return self._run(requests, on_tokens)

    def _run(
        self, requests: Sequence[GenerationRequest], on_tokens: Callable[[int], None] | None
    ) -> list[Completion]:
        num_blocks = self._num_blocks(requests)
        call = self._start(requests, num_blocks)
        scheduler = Scheduler(
            [request.prompt_ids for request in requests],
            self._limits,
            num_blocks,
            max_new_tokens=[request.sampling.max_new_tokens for request in requests],
            lookahead=self._lookahead,
        )
        num_sampled = 0
        while not scheduler.is_done:
            step = scheduler.next_step()
            finished = call.prefill(step) if isinstance(step, PrefillStep) else call.decode(step)
            for sequence in finished:
                scheduler.finish(sequence)
            call.forget_passes(scheduler.live_keys)
            if on_tokens is not None:
                on_tokens(call.num_sampled - num_sampled)
            num_sampled = call.num_sampled
        self.num_preemptions = scheduler.num_preemptions
        return [call.completion(index, self._weights_version) for index in range(len(requests))]

    def _start(self, requests: Sequence[GenerationRequest], num_blocks: int) -> GenerateCall:
        """Tensors of a call, with a cache of at least ``num_blocks``."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = PagedCache(num_blocks, self._limits.block_size)
        on_cpu = self._device.type == "cpu"
        return GenerateCall(
            self._model,
            self._device,
            self._cache,
            requests,
            self._limits.max_num_seqs,
            self._decoder,
            longest_pass=self._limits.max_num_batched_tokens if on_cpu else None,
        )

    def _cache_tokens(self) -> int | None:
        """The limit in whole blocks."""
        limit, size = self._limits.cache_tokens, self._limits.block_size
        return None if limit is None else limit // size * size

    def _num_blocks(self, requests: Sequence[GenerationRequest]) -> int:
        size = self._limits.block_size
        cache_tokens = self._cache_tokens()
        if cache_tokens is not None:
            return cache_tokens // size
        needs = sorted(
            (-(-(len(r.prompt_ids) + r.sampling.max_new_tokens) // size) for r in requests), reverse=True
        )
        prompts = {request.prompt_ids for request in requests}
        return (
            sum(needs[: self._limits.max_num_seqs]) + sum(-(-len(prompt) // size) for prompt in prompts) + 1
        )
