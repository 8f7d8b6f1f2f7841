"""``Rows``: the rows of a forward call, named by whoever made the batch.

For calls that cannot be read: packed ids without restarting positions, an engine's flat token axis.
Takes plain lists; checks their lengths. No torch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trainfer.errors import CaptureError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One entry per row, in the order of the token axis; give ``sequence_lengths`` or ``requests``.

    Examples:
        Two whole sequences packed end to end:
        ``Rows(token_ids=[5, 6, 7, 8, 9], sequence_lengths=[3, 2])``.

        An engine's step: request "a" decodes its fifth token, "b" prefills two, one row is a dummy:
        ``Rows(token_ids=[7, 1, 2, 0], requests=["a", "b", "b", None], positions=[4, 0, 1, -1])``. Earlier tokens
        of a request come from earlier calls; where a cache supplied them, name them in ``prefixes``.
    """

    token_ids: Sequence[int]
    """Token id of each row."""
    sequence_lengths: Sequence[int] | None = None
    """Rows of each whole sequence; what is left over at the end is padding."""
    requests: Sequence[Hashable | None] | None = None
    """Request of each row, the same name in every call; None for a row that belongs to none."""
    positions: Sequence[int] | None = None
    """0-based place of each row's token within prompt + response; goes with ``requests``."""
    prefixes: dict[Hashable, Sequence[int]] | None = None
    """Tokens of a request from position 0 that no captured call executed (a prefix cache's)."""

    def __post_init__(self) -> None:
        """Check the lengths.

        Raises:
            CaptureError: they do not fit together.
        """
        count = len(self.token_ids)
        if (self.sequence_lengths is None) == (self.requests is None):
            raise CaptureError("Rows: give either sequence_lengths, or requests with positions")
        if self.sequence_lengths is not None:
            total = sum(self.sequence_lengths)
            if total > count or min(self.sequence_lengths, default=1) < 1:
                raise CaptureError(
                    f"Rows: sequence_lengths are at least 1 and sum to at most the {count} token_ids, not {total}"
                )
        elif self.positions is None or len(self.positions) != count or len(self.requests or ()) != count:
            raise CaptureError(
                f"Rows: requests and positions need one entry for each of the {count} token_ids"
            )

    def segments(self) -> list["Segment"]:
        """Runs of rows that belong to one sequence and follow one another."""
        if self.sequence_lengths is not None:
            ends = np.cumsum(self.sequence_lengths).tolist()
            return [
                Segment(request=None, start=end - length, stop=end, first=0)
                for end, length in zip(ends, self.sequence_lengths, strict=True)
            ]
        assert self.requests is not None
        assert self.positions is not None
        segments: list[Segment] = []
        for row, (request, position) in enumerate(zip(self.requests, self.positions, strict=True)):
            if request is None or position < 0:
                continue
            last = segments[-1] if segments else None
            if (
                last
                and last.stop == row
                and last.request == request
                and last.first + row - last.start == position
            ):
                segments[-1] = Segment(request=request, start=last.start, stop=row + 1, first=last.first)
            else:
                segments.append(Segment(request=request, start=row, stop=row + 1, first=position))
        return segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Rows ``start`` to ``stop`` are positions ``first``, ``first + 1`` … of one sequence."""

    request: Hashable | None
    """None: a new sequence that no later call continues."""
    start: int
    stop: int
    first: int
