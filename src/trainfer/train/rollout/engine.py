"""The one seam towards whoever generates.

Takes requests, gives completions in the order of the requests. Weights arrive under their
Transformers names, as plain tensors; an engine maps them to its own layout.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from trainfer.types import Completion, GenerationRequest


class Engine(Protocol):
    """A rollout engine."""

    @property
    def weights_version(self) -> int:
        """Number of optimizer steps behind the weights that it holds."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample every request; one completion per request, in their order.

        ``on_tokens`` is called now and then with the number of tokens sampled since the last call.
        """
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights; drop every cached key and value made with the old ones."""
        ...

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Fingerprint of what the engine computes with, by Transformers name (see ``exact.fingerprint``)."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


@runtime_checkable
class HasModule(Protocol):
    """An engine that computes with a module of this process, which a probe can watch at work."""

    @property
    def module(self) -> nn.Module:
        """The module; hooks on it see every forward, and change no token."""
        ...


@runtime_checkable
class HasLlm(Protocol):
    """An engine whose model lives in vLLM, which a probe watches in its workers."""

    @property
    def llm(self) -> object:
        """The ``vllm.LLM``."""
        ...
