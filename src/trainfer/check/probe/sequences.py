"""Checks recorded sequences and their log-probs.

Takes what a side recorded; gives records, or an error that names the sequence, the rule and the remedy.
"""

import math
from collections.abc import Mapping, Sequence

from trainfer.check.dump.records import Number, SequenceRecord
from trainfer.errors import CaptureError

NO_FILTER: dict[str, float | int] = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}


def check_sequences(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    logprobs: Sequence[Sequence[float]],
    sampling: Mapping[str, float | int],
    request_ids: Sequence[str] | None,
    *,
    first: int,
    weights_version: int,
    step: int,
    pass_name: str,
) -> list[SequenceRecord]:
    """Records of the sequences, numbered from ``first``.

    Raises:
        CaptureError: lengths do not fit together, or ``sampling`` has an unknown key.
    """
    if not len(sequences) == len(prompt_lengths) == len(logprobs):
        raise CaptureError(
            f"record_logprobs got {len(sequences)} sequences, {len(prompt_lengths)} prompt_lengths and "
            f"{len(logprobs)} logprobs; give one of each per sequence"
        )
    if request_ids is not None and len(request_ids) != len(sequences):
        raise CaptureError(
            f"record_logprobs got {len(request_ids)} request_ids for {len(sequences)} sequences"
        )
    unknown = sorted(set(sampling) - set(NO_FILTER))
    if unknown:
        raise CaptureError(f"sampling has unknown keys {unknown}; known are {', '.join(NO_FILTER)}")
    applied = {**NO_FILTER, **sampling}
    records: list[SequenceRecord] = []
    for place, (tokens, prompt_length, values) in enumerate(
        zip(sequences, prompt_lengths, logprobs, strict=True)
    ):
        response_length = len(tokens) - prompt_length
        if not 0 <= prompt_length <= len(tokens) or len(values) != response_length:
            raise CaptureError(
                f"record_logprobs, sequence {place}: {len(tokens)} tokens with a prompt of {prompt_length} leave "
                f"{response_length} response tokens, but there are {len(values)} log-probs; give one per response "
                "token, without padding"
            )
        records.append(
            SequenceRecord(
                index=first + place,
                tokens=tuple(int(token) for token in tokens),
                prompt_length=int(prompt_length),
                logprobs=tuple(_number(float(value)) for value in values),
                sampling=applied,
                weights_version=weights_version,
                step=step,
                pass_name=pass_name,
                request_id=None if request_ids is None else request_ids[place],
            )
        )
    return records


def _number(value: float) -> Number:
    return value if math.isfinite(value) else str(value)
