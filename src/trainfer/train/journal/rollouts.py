"""rollouts/STEP.jsonl: what was sampled, how it was scored, and what both sides thought of each token.

Takes ``RolloutRecord``s; gives one strict-JSON object per sequence, the whole file at once or not at all.
Non-finite floats are the strings ``nan``, ``inf``, ``-inf`` here: a list of log-probs keeps its length.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfer.train.journal.atomic import write_atomically
from trainfer.types import SampledSequence

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?:validation_)?(\d{1,12})\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRecord:
    """One sequence of one step, scored."""

    sequence: SampledSequence
    score: float
    advantage: float | None
    """None in validation."""
    train_logprobs: tuple[float, ...] | None
    """The actor's, of the sampled distribution, one per response token; None where it was not asked."""


def write_rollouts(
    folder: Path, step: int, records: Iterable[RolloutRecord], *, validation: bool = False
) -> Path | None:
    """Write ``STEP.jsonl`` (validation: ``validation_STEP.jsonl``) in ``folder`` and return its path.

    A full disk or an unwritable folder is a warning: rollouts are a log, and no run should die of its log.
    Nothing half-written stays, and None is returned.
    """
    path = folder / f"{'validation_' if validation else ''}{step}.jsonl"
    try:
        folder.mkdir(exist_ok=True)
        write_atomically(path, (_line(step, record) for record in records))
    except OSError as error:
        logger.warning("%s was not written (%s); training goes on.", path, error.strerror)
        return None
    return path


def remove_rollouts_after(folder: Path, step: int) -> None:
    """Cut back to the resumed step, as the metrics are: the steps after it will be sampled again."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and int(match.group(1)) > step:
            path.unlink()


def _line(step: int, record: RolloutRecord) -> bytes:
    sequence, sampling = record.sequence, record.sequence.sampling
    fields = {
        "step": step,
        "group": sequence.group,
        "sample_index": sequence.sample_index,
        "prompt_index": sequence.prompt.index,
        "data_source": sequence.prompt.data_source,
        "messages": [
            {"role": message.role, "content": message.content} for message in sequence.prompt.messages
        ],
        "response": sequence.response_text,
        "ground_truth": sequence.prompt.ground_truth,
        "score": _number(record.score),
        "advantage": None if record.advantage is None else _number(record.advantage),
        "finish_reason": sequence.finish_reason.value,
        "seed": sequence.seed,
        "weights_version": sequence.weights_version,
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
        },
        "prompt_ids": sequence.prompt.token_ids,
        "response_ids": sequence.response_ids,
        "rollout_logprobs": _numbers(sequence.rollout_logprobs),
        "train_logprobs": None if record.train_logprobs is None else _numbers(record.train_logprobs),
    }
    return json.dumps(fields, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _numbers(values: Sequence[float]) -> list[float | str]:
    return [_number(value) for value in values]
