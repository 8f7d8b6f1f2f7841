"""What verl 0.6.1 puts into a micro-batch, as plain lists: sequences, response lengths.

Takes the mapping that ``_forward_micro_batch`` gets: prompts padded on the left, responses on the right, one row a sequence.
It names no sequence: rows are joined by their token ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Sequences of one forward, without padding."""

    sequences: list[list[int]]
    response_lengths: list[int]

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(s) - r for s, r in zip(self.sequences, self.response_lengths, strict=True)]


def read_micro_batch(batch: Mapping[str, Any]) -> MicroBatch:
    """Read a micro-batch: ``input_ids`` and ``attention_mask`` [B, P + R], ``responses`` [B, R]."""
    width = batch["responses"].shape[-1]
    ids, mask = batch["input_ids"].cpu(), batch["attention_mask"].cpu().bool()
    responses = mask[:, mask.shape[1] - width :]
    return MicroBatch(
        sequences=[row[kept].tolist() for row, kept in zip(ids, mask, strict=True)],
        response_lengths=[int(count) for count in responses.sum(dim=1).tolist()],
    )


def response_logprobs(batch: MicroBatch, log_probs_BR: Tensor) -> list[list[float]]:
    """Log-probs of each response token; what stands in padding is left out."""
    rows = log_probs_BR.detach().float().cpu()
    return [row[:length].tolist() for row, length in zip(rows, batch.response_lengths, strict=True)]


def prompts_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same micro-batch without responses; its last prompt token is scored in their place.

    ``_forward_micro_batch`` scores the last ``responses.size(-1)`` tokens, and cannot score none.
    """
    width = batch["responses"].shape[-1]
    trimmed = dict(batch)
    for name in ("input_ids", "attention_mask", "position_ids"):
        trimmed[name] = batch[name][..., : batch[name].shape[-1] - width]
    trimmed["responses"] = trimmed["input_ids"][:, -1:]
    return trimmed
