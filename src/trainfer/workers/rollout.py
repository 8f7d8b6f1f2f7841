"""The rollout: an engine that samples, on one rank.

Takes requests, gives completions; takes weights and says what it computes with. Everything else is the
engine's own (``train.rollout.engine``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from trainfer.train.rollout.engine import Engine
from trainfer.types import Completion, GenerationRequest


class RolloutWorker:
    """One engine."""

    def __init__(self, engine: Engine) -> None:
        """Take over ``engine``."""
        self.engine = engine

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Sample, in the order of the requests."""
        return self.engine.generate(requests, on_tokens=on_tokens)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights."""
        self.engine.load_weights(named_tensors, version=version)

    def weight_fingerprints(self) -> Mapping[str, str]:
        """Of every tensor that the engine computes with."""
        return self.engine.weight_fingerprints()

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()
