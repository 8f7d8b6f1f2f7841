"""Plain ``generate`` of Transformers with its own attention, warpers and left padding: the simple reference.

Takes a built causal LM; implements ``train.rollout.engine.Engine``. Shares with the builtin engine neither
attention, batching nor sampling code, so that the two check one another. Requests with equal sampling
parameters run in one left-padded batch of at most ``max_num_seqs``; each sequence draws from a generator of its
own, seeded with its seed, so tokens do not depend on the batch (up to rounding of the probabilities). Other
engines draw other tokens from the same distribution.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainfer.engines.limits import EngineLimits
from trainfer.engines.module_mode import evaluating
from trainfer.engines.module_weights import copy_weights, fingerprints
from trainfer.engines.requests import check_requests
from trainfer.errors import EngineError
from trainfer.types import Completion, FinishReason, GenerationRequest, SamplingParams

_SEED_MASK = (1 << 64) - 1


class _Draw(LogitsProcessor):
    """Draws each row's token, remembers its log-prob, and leaves ``generate`` no other choice."""

    def __init__(self, seeds: Sequence[int], sampling: SamplingParams, device: torch.device) -> None:
        self._generators = [torch.Generator(device=device).manual_seed(_signed(seed)) for seed in seeds]
        self._warpers = _warpers(sampling)
        self._is_greedy = sampling.temperature == 0
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores that are 0 at the drawn token and -inf elsewhere."""
        warped = self._warpers(input_ids, cast(torch.FloatTensor, scores.float()))
        logprobs_NV = warped.log_softmax(dim=-1)
        if logprobs_NV.isnan().any():
            raise EngineError(
                "the model's logits are not finite; check the weights (a diverged update?) and the dtype"
            )
        if self._is_greedy:
            tokens_N1 = scores.argmax(dim=-1, keepdim=True)
        else:
            draws = zip(logprobs_NV.exp(), self._generators, strict=True)
            tokens_N1 = torch.stack(
                [torch.multinomial(row, 1, generator=generator) for row, generator in draws]
            )
        self.logprobs.append(logprobs_NV.gather(1, tokens_N1)[:, 0])
        forced_NV = torch.full_like(scores, float("-inf")).scatter(1, tokens_N1, 0.0)
        return cast(torch.FloatTensor, forced_NV)


def _signed(seed: int) -> int:
    """The seed's low 64 bits in the range that ``manual_seed`` takes."""
    low = seed & _SEED_MASK
    return low - (1 << 64) if low >> 63 else low


def _warpers(sampling: SamplingParams) -> LogitsProcessorList:
    """Transformers' own, in its order; none for greedy decoding."""
    warpers = LogitsProcessorList()
    if sampling.temperature == 0:
        return warpers
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k != -1:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


class HfEngine:
    """See the module docstring.

    Args:
        model: A causal LM of Transformers; its attention implementation is "sdpa" while it generates.
        limits: Only ``max_num_seqs`` matters here.
        weights_version: Optimizer steps behind the module's weights.
    """

    def __init__(self, model: nn.Module, *, limits: EngineLimits, weights_version: int = 0) -> None:
        if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
            raise EngineError(f"the hf engine needs a causal LM of Transformers, got {type(model).__name__}")
        self._model: PreTrainedModel = model
        self._limits = limits
        self._weights_version = weights_version
        self._is_complete = True

    @property
    def module(self) -> nn.Module:
        """What it computes with."""
        return self._model

    @property
    def weights_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return self._weights_version

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights in place; nothing is cached between calls."""
        self._is_complete = False
        copy_weights(self._model, named_tensors)
        self._is_complete = True
        self._weights_version = version

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of all parameters and buffers, tied names included."""
        return fingerprints(self._model)

    def close(self) -> None:
        """Nothing is held."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Sample every request; see ``Engine``.

        Raises:
            EngineError: As the builtin engine's.
        """
        if not self._is_complete:
            raise EngineError(
                "the engine holds a partial set of weights, because the last load_weights failed; send them again"
            )
        config = self._model.config
        check_requests(
            requests,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            cache_tokens=None,
        )
        by_sampling: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            by_sampling.setdefault(request.sampling, []).append(index)
        completions: dict[int, Completion] = {}
        with evaluating(self._model), _reference(self._model), torch.no_grad():
            for members in by_sampling.values():
                for begin in range(0, len(members), self._limits.max_num_seqs):
                    batch = members[begin : begin + self._limits.max_num_seqs]
                    done = self._batch([requests[index] for index in batch])
                    completions.update(zip(batch, done, strict=True))
                    if on_tokens is not None:
                        on_tokens(sum(len(item.token_ids) for item in done))
        return [completions[index] for index in range(len(requests))]

    def _batch(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Requests with equal sampling parameters."""
        sampling = requests[0].sampling
        device = self._model.device
        width = max(len(request.prompt_ids) for request in requests)
        pads = [width - len(request.prompt_ids) for request in requests]
        ids = [[0] * pad + list(request.prompt_ids) for pad, request in zip(pads, requests, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        drawer = _Draw([request.seed for request in requests], sampling, device)
        # Transformers types the mixin for its own classes only
        output = self._model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([drawer]),
        )
        tokens = output[:, width:].tolist()
        logprobs = torch.stack(drawer.logprobs, dim=1).tolist()
        return [
            self._completion(request, row, values)
            for request, row, values in zip(requests, tokens, logprobs, strict=True)
        ]

    def _completion(
        self, request: GenerationRequest, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> Completion:
        stops = request.sampling.stop_token_ids
        end = next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))
        return Completion(
            request_id=request.request_id,
            token_ids=tuple(tokens[:end]),
            logprobs=tuple(logprobs[:end]),
            finish_reason=FinishReason.STOP if tokens[end - 1] in stops else FinishReason.LENGTH,
            weights_version=self._weights_version,
        )


@contextlib.contextmanager
def _reference(model: PreTrainedModel) -> Iterator[None]:
    """Stock attention and none of the folder's generation defaults, restored afterwards."""
    attention, defaults = model.config._attn_implementation, model.generation_config
    assert attention is not None, "from_pretrained and from_config always set one"
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults
        model.set_attn_implementation(attention)
