"""The weight of the KL penalty in the reward: fixed, or steered towards a target (Ziegler et al., 2019, section 2.2).

Takes the KL that each step measured; gives the weight of the next one. As in verl: after a step of N sequences the weight is
multiplied by ``1 + clip(KL / target - 1, -0.2, 0.2) * N / horizon``, where KL is the mean over sequences of their mean per
token.
"""

import math
from dataclasses import dataclass

from trainfer.errors import RewardError

CLIP = 0.2
"""Largest relative error that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlTarget:
    """What an adaptive weight aims at. Example: target 0.1, horizon 10000; 1024 sequences at KL 0.2 make it 2 % larger."""

    kl: float
    """Mean KL per token, in nats."""
    horizon: int
    """Sequences over which the weight reacts."""


class KlControl:
    """The weight, from step to step."""

    def __init__(self, weight: float, target: KlTarget | None = None) -> None:
        """``target`` None keeps the weight."""
        self._weight = weight
        self._target = target

    @property
    def weight(self) -> float:
        """Of the present step."""
        return self._weight

    @property
    def is_adaptive(self) -> bool:
        """True where the weight moves."""
        return self._target is not None

    def update(self, kl: float, *, sequences: int) -> None:
        """Move on after a step.

        Raises:
            RewardError: the KL is not finite.
        """
        if not math.isfinite(kl):
            raise RewardError(
                f"the KL to the reference model is {kl}, so algorithm.kl_ctrl cannot follow it; lower the learning rate."
            )
        if self._target is not None:
            error = min(max(kl / self._target.kl - 1, -CLIP), CLIP)
            self._weight *= 1 + error * sequences / self._target.horizon

    def restore(self, weight: float) -> None:
        """Go on where an earlier process was."""
        self._weight = weight
