"""Validation before the first step, and validation alone (``trainer.val_only``).

Takes an opened session; gives metrics, or writes what it found where there is no step to add it to.
"""

import logging

from trainfer.train.metrics import Watcher
from trainfer.workers.session import Session
from trainfer.workers.validation import metrics_of, validate

logger = logging.getLogger(__name__)


def validate_before(session: Session, watcher: Watcher) -> dict[str, float]:
    """Validate the policy as it starts; ``val-before-train/*`` then stands in the first step's line.

    With ``trainer.val_only`` that is all there is to do: the responses are written too, under the last step that was done.
    """
    if not session.validates_before:
        return {}
    watcher.stage("testing")
    records = validate(session.inputs, session.group, session.validation_sampling)
    metrics = metrics_of(session.inputs, records)
    if session.inputs.config.trainer.val_only:
        session.journal.write_validation(session.steps.start - 1, metrics, records)
        for name, value in metrics.items():
            logger.info("%s: %.4f (%d responses)", name, value, len(records))
        return {}
    session.journal.loggers.log(0, metrics)
    return {f"val-before-train/{name.removeprefix('val-core/')}": value for name, value in metrics.items()}
