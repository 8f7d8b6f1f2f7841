"""What verl 0.9.1 puts into a micro-batch, as plain lists: sequences, prompt lengths, log-probs, names.

Takes a TensorDict whose ``input_ids`` are nested (V1) or whose responses are padded (the older trainer); gives integers and
floats. A log-prob at place j of a sequence scores token j + 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Sequences of one forward."""

    sequences: list[list[int]]
    response_lengths: list[int]
    names: list[str] | None
    """``uid/session``: which sample of which prompt; None where the batch does not say."""
    temperatures: list[float]
    real: list[bool]
    """False for sequences that only pad the batch to a size."""

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(s) - r for s, r in zip(self.sequences, self.response_lengths, strict=True)]

    def prompts(self) -> "MicroBatch":
        """The same without responses."""
        return replace(
            self,
            sequences=[s[:length] for s, length in zip(self.sequences, self.prompt_lengths, strict=True)],
            response_lengths=[0] * len(self.sequences),
        )


def read_micro_batch(batch: Any) -> MicroBatch:
    """Read a micro-batch of 0.9.1."""
    sequences = [part.tolist() for part in batch["input_ids"].unbind()]
    lengths = _response_lengths(batch)
    return MicroBatch(
        sequences=sequences,
        response_lengths=lengths,
        names=_names(batch),
        temperatures=_temperatures(batch, len(sequences)),
        real=_real(batch, len(sequences)),
    )


def _response_lengths(batch: Any) -> list[int]:
    responses = batch["responses"]
    if responses.is_nested:
        return [len(part) for part in responses.unbind()]
    width = responses.shape[1]
    return [int(count) for count in batch["attention_mask"][:, -width:].sum(dim=1).tolist()]


def _names(batch: Any) -> list[str] | None:
    if "uid" not in batch:
        return None
    uids = _strings(batch["uid"])
    sessions = _strings(batch["session_id"]) if "session_id" in batch else None
    return (
        uids
        if sessions is None
        else [f"{uid}/{session}" for uid, session in zip(uids, sessions, strict=True)]
    )


def _strings(values: Any) -> list[str]:
    if isinstance(values, Tensor):
        return [str(value) for value in values.tolist()]
    return [str(getattr(value, "data", value)) for value in values]


def _temperatures(batch: Any, count: int) -> list[float]:
    value = batch["temperature"]
    value = getattr(value, "data", value) if not isinstance(value, Tensor) else value
    if isinstance(value, Tensor):
        numbers = [float(number) for number in value.reshape(-1).tolist()]
        return numbers * count if len(numbers) == 1 else numbers
    return [float(value)] * count


def _real(batch: Any, count: int) -> list[bool]:
    """A sequence without a single trained token only fills the batch (``_balance_batch`` of V1)."""
    mask = batch.get("response_mask", None)
    if not isinstance(mask, Tensor):
        return [True] * count
    parts = mask.unbind() if mask.is_nested else list(mask)
    return [bool(part.any().item()) for part in parts]


def response_logprobs(batch: MicroBatch, log_probs: Tensor) -> list[list[float]]:
    """Log-probs of each response token, out of one value for each input token (nested)."""
    found: list[list[float]] = []
    for part, length in zip(log_probs.unbind(), batch.response_lengths, strict=True):
        values = part.detach().float()
        first = len(values) - length - 1
        found.append(values[max(first, 0) : len(values) - 1].tolist() if length else [])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPart:
    """This rank's part of a packed row: tokens, whose they are, and where they stand."""

    token_ids: list[int]
    requests: list[int | None]
    positions: list[int]
    prefixes: dict[int, list[int]]


def packed_part(sequences: Sequence[Sequence[int]], *, rank: int, parts: int, width: int) -> PackedPart:
    """Rows ``rank * width`` to ``(rank + 1) * width`` of all sequences end to end, as Ulysses cuts them.

    Args:
        sequences: Token ids, in the order of packing.
        rank: Which part, from 0.
        parts: How many parts there are.
        width: Slots of one part; what lies behind the last token is padding.

    Example: [5, 6, 7], [8, 9] in two parts of 3: part 1 is tokens [8, 9, 0] at positions [0, 1, -1].
    """
    assert 0 <= rank < parts
    flat: list[tuple[int, int, int]] = [
        (number, position, token)
        for number, sequence in enumerate(sequences)
        for position, token in enumerate(sequence)
    ]
    mine = flat[rank * width : (rank + 1) * width]
    padding = width - len(mine)
    prefixes: dict[int, list[int]] = {}
    for number, position, _ in mine[:1]:
        if position:
            prefixes[number] = list(sequences[number][:position])
    return PackedPart(
        token_ids=[token for _, _, token in mine] + [0] * padding,
        requests=[number for number, _, _ in mine] + [None] * padding,
        positions=[position for _, position, _ in mine] + [-1] * padding,
        prefixes=prefixes,
    )


def flag(batch: Any, key: str, *, default: bool) -> bool:
    """A setting that travels with a batch, or with the names of one that lies elsewhere (``KVBatchMeta`` of V1)."""
    settings = getattr(batch, "extra_info", None)
    if not isinstance(settings, Mapping):
        settings = batch
    value = settings.get(key, default)
    return bool(getattr(value, "data", value))
