"""Exact mode is switched on where it holds: ``trainfer.exact`` and a calibration decide, once, when an engine starts.

Takes the configuration and the engine's model; sets the rules of this process and says in one line what was decided.
"""

import logging

import torch
from torch import nn

from trainfer.config.schema import TrainConfig
from trainfer.errors import EngineError
from trainfer.exact.calibration_store import calibration_of
from trainfer.exact.rules import ORDINARY, KeyLengths, use_key_lengths

logger = logging.getLogger(__name__)


def settle_exactness(config: TrainConfig, model: nn.Module, *, trains_in: torch.dtype) -> bool:
    """Switch exact mode on or off for this process; True where it is on.

    Args:
        config: ``trainfer.exact`` and the engine's name are read.
        model: The engine's model.
        trains_in: Format of the trainer's forward.

    Raises:
        EngineError: ``trainfer.exact=true``, and something stands against it; names it.
    """
    if config.trainfer.exact == "false":
        use_key_lengths(ORDINARY)
        return False
    obstacle = _obstacle(config, model, trains_in)
    if obstacle is None:
        return True
    use_key_lengths(ORDINARY)
    if config.trainfer.exact == "true":
        raise EngineError(
            f"trainfer.exact=true cannot be kept here: {obstacle}. Set trainfer.exact=auto to train without it; agreement is "
            "then measured at every step, not promised."
        )
    logger.warning("Exact mode is off: %s. Agreement is measured at every step.", obstacle)
    return False


def _obstacle(config: TrainConfig, model: nn.Module, trains_in: torch.dtype) -> str | None:
    """Why rollout and training log-probs will not be bitwise equal; sets the key lengths where they will."""
    name = config.actor_rollout_ref.rollout.name
    if name != "builtin":
        return f"actor_rollout_ref.rollout.name={name} does not compute as the trainer does; only builtin can"
    samples_in = next(model.parameters()).dtype
    if samples_in != trains_in:
        return f"the engine computes in {samples_in}, the trainer in {trains_in} (rollout.dtype, actor.fsdp_config)"
    calibration = calibration_of(model)
    if not calibration.is_exact:
        more = len(calibration.problems) - 1
        return f"{calibration.problems[0]}" + (f" (and {more} more)" if more else "")
    lengths, rows = calibration.safe_key_lengths, calibration.decode_rows
    use_key_lengths(KeyLengths(safe=lengths, decode_rows=rows))
    return None
