"""Runs the scheduler's steps of one ``generate`` call on the model.

Takes a ``PrefillStep`` or ``DecodeStep``; runs the forward, draws a token for each of its sequences, appends
it, and says which sequences are finished. Decides nothing about order or blocks.

Axes: T rows, B slots, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainfer.engines.builtin.chunks import chunk_tokens, prefill_chunks
from trainfer.engines.builtin.cpu_program import Decoder
from trainfer.engines.builtin.decode import DecodeSlots
from trainfer.engines.builtin.kv_cache import PagedCache, PrefillPlan
from trainfer.engines.builtin.sampler import draw, uniforms
from trainfer.engines.builtin.scheduler import DecodeStep, PrefillPass, PrefillStep, Tracked
from trainfer.errors import EngineError
from trainfer.exact.logprobs import RowSampling, row_sampling
from trainfer.exact.packed import CausalModel, pack_prompts
from trainfer.types import Completion, FinishReason, GenerationRequest


class GenerateCall:
    """Tensors and results of one call."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        cache: PagedCache,
        requests: Sequence[GenerationRequest],
        max_num_seqs: int,
        decoder: Decoder,
        *,
        longest_pass: int | None = None,
    ) -> None:
        """Begin a call; a prompt of more than ``longest_pass`` tokens runs in chunks of no more (None: never)."""
        self._longest_pass = longest_pass
        self._model = model
        self._decoder = decoder
        self._device = device
        self._cache = cache
        self._requests = requests
        self._slots = DecodeSlots(cache, min(max_num_seqs, len(requests)), device)
        self._pass_logits: dict[int, Tensor] = {}
        self._sampling: tuple[tuple[Tracked, ...], RowSampling] | None = None
        self._uniforms = [uniforms(r.seed, r.sampling.max_new_tokens) for r in requests]
        self._stops = [frozenset(request.sampling.stop_token_ids) for request in requests]
        self._tokens: list[list[int]] = [[] for _ in requests]
        self.num_sampled = 0
        """Tokens of all sequences so far."""
        self._logprobs: list[list[float]] = [[] for _ in requests]

    def prefill(self, step: PrefillStep) -> list[Tracked]:
        """Run the new passes, if any, and draw each sequence's next token."""
        if step.passes:
            logits_RV = self._run_passes(step.passes)
            self._pass_logits.update(zip([item.key for item in step.passes], logits_RV, strict=True))
        logits_BV = torch.stack([self._pass_logits[key] for key in step.keys])
        return self._draw(logits_BV, step.sequences)

    def forget_passes(self, live_keys: set[int]) -> None:
        """Drop logits that no later step asks for."""
        self._pass_logits = {key: row for key, row in self._pass_logits.items() if key in live_keys}

    def decode(self, step: DecodeStep) -> list[Tracked]:
        """Feed each sequence's last token and draw the next."""
        if step.copies:
            self._cache.copy_blocks(step.copies)
        rows = self._slots.rows(step.sequences)
        logits_BV = self._decoder.logits(rows.input_ids_B, rows.plan)
        return self._draw(logits_BV[: len(rows.slots)], rows.slots)

    def completion(self, index: int, weights_version: int) -> Completion:
        """What was sampled for a request."""
        stopped = self._tokens[index][-1] in self._stops[index]
        return Completion(
            request_id=self._requests[index].request_id,
            token_ids=tuple(self._tokens[index]),
            logprobs=tuple(self._logprobs[index]),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            weights_version=weights_version,
        )

    def _run_passes(self, passes: Sequence[PrefillPass]) -> Tensor:
        """Logits ``[passes, V]`` of each pass's last row; keys and values go to the cache."""
        if self._longest_pass is not None and len(passes[0].token_ids) > self._longest_pass:
            assert len(passes) == 1, "the scheduler runs a prompt above the limit by itself"
            return self._run_chunks(passes[0], self._longest_pass)
        batch = pack_prompts([item.token_ids for item in passes], device=self._device)
        rows = [row for item in passes for row in self._cache.rows_of(item.blocks, 0, len(item.token_ids))]
        idle = batch.input_ids.shape[1] - len(rows)
        plan = PrefillPlan(
            packed=batch.plan,
            cache=self._cache,
            cache_rows_T=torch.tensor(rows + [0] * idle, dtype=torch.int64, device=self._device),
        )
        output = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.scored_rows,
            attention_plan=plan,
        )
        return output.logits[0, : len(passes)]

    def _run_chunks(self, item: PrefillPass, longest: int) -> Tensor:
        """Logits ``[1, V]`` of the last row of a pass that is too long for one forward."""
        logits_1V = torch.empty(0)
        for chunk in prefill_chunks(item.token_ids, self._cache, item.blocks, chunk_tokens(longest)):
            output = self._model(
                input_ids=chunk.input_ids,
                position_ids=chunk.position_ids,
                use_cache=False,
                logits_to_keep=chunk.kept_rows,
                attention_plan=chunk.plan,
            )
            logits_1V = output.logits[0, :1]
        return logits_1V

    def _draw(self, logits_BV: Tensor, sequences: tuple[Tracked, ...]) -> list[Tracked]:
        """Draw, append, and return the finished sequences."""
        if self._sampling is None or self._sampling[0] != sequences:
            params = [self._requests[sequence.index].sampling for sequence in sequences]
            self._sampling = (sequences, row_sampling(params, [1] * len(params), device=self._device))
        numbers = [self._uniforms[sequence.index][len(sequence.sampled_ids)] for sequence in sequences]
        uniforms_B = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        drawn = draw(logits_BV, uniforms_B, self._sampling[1])
        finished: list[Tracked] = []
        pairs = zip(sequences, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True)
        for sequence, token, logprob in pairs:
            if self._append(sequence, token, logprob):
                finished.append(sequence)
        return finished

    def _extend(self, sequence: Tracked, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Take tokens drawn one after another, up to the sequence's last; True when that is among them."""
        index = sequence.index
        end = self._requests[index].sampling.max_new_tokens - len(sequence.sampled_ids)
        if self._stops[index].isdisjoint(tokens[:end]) and all(map(math.isfinite, logprobs[:end])):
            sequence.sampled_ids.extend(tokens[:end])
            self._tokens[index].extend(tokens[:end])
            self._logprobs[index].extend(logprobs[:end])
            self.num_sampled += min(end, len(tokens))
            return end <= len(tokens)
        return any(
            self._append(sequence, token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)
        )

    def _append(self, sequence: Tracked, token: int, logprob: float) -> bool:
        """Take a drawn token; True when it is the sequence's last."""
        index = sequence.index
        if not math.isfinite(logprob):
            raise EngineError(
                f"request {self._requests[index].request_id!r}: the model's logits are not finite at response token "
                f"{len(sequence.sampled_ids)}; check the weights (a diverged update?) and the dtype"
            )
        sequence.sampled_ids.append(token)
        self._tokens[index].append(token)
        self._logprobs[index].append(logprob)
        self.num_sampled += 1
        is_full = len(sequence.sampled_ids) == self._requests[index].sampling.max_new_tokens
        return is_full or token in self._stops[index]
