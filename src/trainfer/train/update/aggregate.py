"""How the token losses of a mini-batch become one number: a weight per sequence, plain arithmetic.

Takes how many tokens train in a sequence and the totals of the whole mini-batch over all ranks;
gives the factor of each of the sequence's token losses. The loss of a mini-batch is the plain sum
of factor x token loss, so neither the micro-batch size, the packing nor the number of ranks moves it.
"""

import enum
from dataclasses import dataclass


class LossAggregation(enum.Enum):
    """verl's ``loss_agg_mode``."""

    TOKEN_MEAN = "token-mean"
    """Mean over every trained token of the mini-batch."""
    TOKEN_SUM = "token-sum"
    """Sum over every trained token: the gradient grows with the batch."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """Mean over sequences of the sum over their tokens."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Mean over sequences of the mean over their tokens."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """As seq-mean-token-sum, divided by a constant horizon (Dr. GRPO)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatchTotals:
    """Counts of one mini-batch over all ranks: the divisors.

    Example: two sequences that train 3 and 1 tokens have ``tokens=4, sequences=2``.
    """

    tokens: int
    """Response tokens that train."""
    sequences: int
    """Sequences, those that train no token included."""


def token_weight(
    aggregation: LossAggregation, *, trained_tokens: int, totals: MiniBatchTotals, horizon: int
) -> float:
    """Factor of one token's loss in the mini-batch's loss.

    Example: token-mean over totals of 4 tokens gives 0.25; seq-mean-token-mean for a sequence of
    3 trained tokens among 2 sequences gives 1/6.

    Args:
        aggregation: The mode.
        trained_tokens: Tokens of this sequence that train.
        totals: Of the mini-batch, all ranks.
        horizon: Divisor of seq-mean-token-sum-norm: ``loss_scale_factor`` or the response limit.
    """
    match aggregation:
        case LossAggregation.TOKEN_MEAN:
            divisor = totals.tokens
        case LossAggregation.TOKEN_SUM:
            divisor = 1
        case LossAggregation.SEQ_MEAN_TOKEN_SUM:
            divisor = totals.sequences
        case LossAggregation.SEQ_MEAN_TOKEN_MEAN:
            divisor = totals.sequences * trained_tokens
        case LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            divisor = totals.sequences * horizon
    # A mini-batch or sequence that trains nothing has only masked tokens: any finite factor will do.
    return 1.0 / max(divisor, 1)
