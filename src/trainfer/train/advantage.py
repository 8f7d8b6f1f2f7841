"""Rewards of a group -> one advantage per sequence. Plain Python.

Takes one reward and one group name per sequence, in any order; gives the advantages in the
same order. It spreads nothing over tokens and knows no tensors: each response token of a
sequence trains with its sequence's advantage.

Axes: N sequences, G sequences of a group.
"""

import math
import statistics
from collections.abc import Hashable, Sequence

from trainfer.errors import RewardError

EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, norm_by_std: bool = True
) -> list[float]:
    """Give each sequence its reward minus its group's mean, over the group's spread.

    ``(reward - mean) / (std + 1e-6)`` with the n-1 standard deviation (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2; n-1 and 1e-6 as in verl). Example: rewards 1, 0, 0, 0 of
    one group have mean 0.25 and std 0.5, so the first gets 0.75 / 0.500001.

    A group whose rewards are all equal gets exactly 0. A group of one has nothing to be compared
    with and keeps its reward. Means and deviations are exact sums rounded once, so the order of the
    sequences changes no bit of the result.

    Args:
        rewards: one float per sequence.
        groups: one name per sequence; sequences of equal name were sampled from the same prompt.
        norm_by_std: False leaves the division out (Dr. GRPO, arXiv:2503.20783).

    Raises:
        RewardError: a reward is NaN or infinite, or the two lengths differ.
    """
    if len(rewards) != len(groups):
        raise RewardError(
            f"{len(rewards)} rewards for {len(groups)} group names; each sequence needs one of both."
        )
    bad = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
    if bad:
        raise RewardError(
            f"the reward of sequence {bad[0]} (group {groups[bad[0]]!r}) is {rewards[bad[0]]}, and {len(bad)} of "
            f"{len(rewards)} rewards are not finite; a reward must be a finite number, so make the reward "
            "function give one (0.0 for an answer that it cannot judge)."
        )
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        of_group = _advantages_of_one_group([float(rewards[i]) for i in indices], norm_by_std=norm_by_std)
        for index, advantage in zip(indices, of_group, strict=True):
            advantages[index] = advantage
    return advantages


def _advantages_of_one_group(rewards_G: list[float], *, norm_by_std: bool) -> list[float]:
    if len(rewards_G) == 1:
        return rewards_G
    mean = statistics.mean(rewards_G)
    centred_G = [reward - mean for reward in rewards_G]
    if not norm_by_std:
        return centred_G
    divisor = statistics.stdev(rewards_G) + EPSILON
    return [centred / divisor for centred in centred_G]
