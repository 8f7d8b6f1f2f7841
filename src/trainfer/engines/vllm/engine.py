"""vLLM as an ``Engine``: colocated, in this process, weights by ``reload_weights``, every tensor accounted for.

Takes ``VllmSettings``; implements ``train.rollout.engine.Engine``. The engine runs in the calling process
(tensor parallelism adds worker processes), so weights are handed over without a copy. Importing this module
imports vLLM: ``environment.prepare_process`` comes first, as in ``engines.registry``.

Tokens depend on a request's seed alone up to rounding: vLLM draws from one generator per request, but its
logits depend in their last bits on what else is in the batch, so a near tie can fall the other way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from trainfer.engines.requests import check_requests
from trainfer.engines.vllm.environment import undisturbed
from trainfer.engines.vllm.pieces import whole_fingerprints
from trainfer.engines.vllm.sampling import check_sampling, completion, vllm_params
from trainfer.engines.vllm.settings import VllmSettings
from trainfer.engines.vllm.start import llm_arguments, start, stop
from trainfer.engines.vllm.transfer import Transfer
from trainfer.errors import EngineError, WeightSyncError
from trainfer.exact.fingerprint import fingerprint
from trainfer.types import Completion, GenerationRequest


class VllmEngine:
    """See the module docstring.

    Args:
        settings: How it is started.
        weights_version: Optimizer steps behind the folder's weights.

    Raises:
        EngineError: vLLM cannot start, or reports other log-probs than those of the sampled distribution.
    """

    def __init__(self, settings: VllmSettings, *, weights_version: int = 0) -> None:
        self._settings = settings
        self._weights_version = weights_version
        self._is_complete = True
        self._is_asleep = False
        self._owns_process_group = not torch.distributed.is_initialized()
        self._num_calls = 0
        self._rotary: dict[str, Tensor] = {}
        self._equivalents: dict[str, dict[str, str]] = {}
        self._llm: Any = start(llm_arguments(settings))
        self._shapes: Mapping[str, tuple[int, ...]] = self._llm.collective_rpc("trainfer_shapes")[0]
        self._ties: Mapping[str, str] = self._llm.collective_rpc("trainfer_ties")[0]

    @property
    def weights_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return self._weights_version

    @property
    def llm(self) -> Any:
        """The ``vllm.LLM``, awake, for a capture of what its workers compute."""
        self._wake()
        return self._llm

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Sample every request; see ``Engine``.

        Raises:
            EngineError: A request that cannot be sampled, or a part of the weights is missing.
        """
        if not self._is_complete:
            raise EngineError(
                "the engine holds a partial set of weights, because the last load_weights failed; send them again"
            )
        check_requests(
            requests,
            vocab_size=self._llm.llm_engine.model_config.get_vocab_size(),
            max_positions=self._settings.max_sequence_tokens,
            cache_tokens=None,
        )
        check_sampling(requests)
        self._wake()
        with undisturbed():
            completions = self._run(requests, on_tokens)
        self._sleep()
        return completions

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights, bucket by bucket, and drop the prefix cache that the old ones filled.

        Raises:
            WeightSyncError: A name is unknown or missing, a shape differs, or tied names bring unequal values.
                The engine may then hold some of the new weights and refuses to generate.
        """
        self._wake()
        self._is_complete = False
        transfer = Transfer(
            shapes=self._shapes, ties=self._ties, reads_by_product=self._settings.device == "cpu"
        )
        with undisturbed():
            for bucket in transfer.buckets(named_tensors, max_bytes=self._settings.bucket_bytes):
                self._llm.collective_rpc("trainfer_load", args=(bucket,))
            if not self._llm.reset_prefix_cache():
                raise WeightSyncError(
                    "vLLM did not drop its prefix cache, which was computed with the old weights; no request may be running "
                    "while weights are loaded"
                )
        self._rotary, self._equivalents = transfer.rotary, transfer.equivalents
        self._is_complete = True
        self._weights_version = version

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of what the workers compute with, by Transformers name, tied names included.

        A rotary buffer that was sent is listed with its fingerprint where every table of angles agrees with it,
        and with a sentence where not.
        """
        self._wake()
        with undisturbed():
            per_worker = self._llm.collective_rpc("trainfer_pieces")
            found = dict(whole_fingerprints(piece for pieces in per_worker for piece in pieces))
            for name, text in found.items():
                found[name] = self._equivalents.get(name, {}).get(text, text)
            for name, tensor in self._rotary.items():
                found[name] = self._rotary_fingerprint(tensor)
        return found

    def close(self) -> None:
        """End vLLM and its workers; a process group that was there before stays."""
        llm, self._llm = self._llm, None
        if llm is not None:
            stop(llm, owns_process_group=self._owns_process_group)

    def _rotary_fingerprint(self, tensor: Tensor) -> str:
        for mismatch in self._llm.collective_rpc("trainfer_rotary_mismatch", args=(tensor,)):
            if mismatch is not None:
                return str(mismatch)
        return fingerprint(tensor)

    def _run(
        self, requests: Sequence[GenerationRequest], on_tokens: Callable[[int], None] | None
    ) -> list[Completion]:
        """Feed vLLM's engine and step it until it is empty; on an error nothing stays behind in it."""
        engine = self._llm.llm_engine
        self._num_calls += 1
        waiting = {f"{self._num_calls}.{index}": index for index in range(len(requests))}
        done: dict[int, Completion] = {}
        try:
            for name, index in waiting.items():
                prompt = {"prompt_token_ids": list(requests[index].prompt_ids)}
                engine.add_request(name, prompt, vllm_params(requests[index]))
            while engine.has_unfinished_requests():
                finished = [output for output in engine.step() if output.finished]
                for output in finished:
                    index = waiting[output.request_id]
                    done[index] = completion(requests[index], output, weights_version=self._weights_version)
                if on_tokens is not None and finished:
                    on_tokens(sum(len(output.outputs[0].token_ids) for output in finished))
        finally:
            if len(done) < len(waiting):
                engine.abort_request([name for name, index in waiting.items() if index not in done])
        return [done[index] for index in range(len(requests))]

    def _sleep(self) -> None:
        """Level 1: weights wait in host memory, the cache is dropped. Level 2 would lose buffers."""
        if self._settings.sleeps and self._settings.device != "cpu":
            self._llm.sleep(level=1)
            self._is_asleep = True

    def _wake(self) -> None:
        """Before weights arrive: waking up afterwards would bring the old ones back."""
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False
