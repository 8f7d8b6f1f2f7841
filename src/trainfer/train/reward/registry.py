"""``data_source`` -> scorer -> one float per response.

Takes the name that a data row carries, the response's text and the row's ground truth; gives the
score. Dispatches on the name as verl does, with two differences: an unknown name is known
before training starts (``known_data_sources``), and a ground truth that is no text is refused,
since ``3 == "3"`` is false and would score 0 for every right answer.

A new scorer is a module of this folder and an entry of ``SCORERS`` under each of its names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfer.errors import RewardError
from trainfer.train.reward import gsm8k, letters


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """How the responses of one data source are judged: each function takes (response, ground truth)."""

    strict: Callable[[str, str], float]
    flexible: Callable[[str, str], float] | None
    """Reads the answer out of freer text; None where there is no such reading."""
    near_miss: Callable[[str, str], bool]
    """True where the strict score is 0 though the response holds the right answer in another form."""


SCORERS: dict[str, Scorer] = {
    gsm8k.DATA_SOURCE: Scorer(
        strict=gsm8k.score_strict, flexible=gsm8k.score_flexible, near_miss=gsm8k.near_miss
    ),
    letters.DATA_SOURCE: Scorer(strict=letters.score, flexible=None, near_miss=letters.near_miss),
}


def known_data_sources() -> tuple[str, ...]:
    """Names that have a scorer, sorted."""
    return tuple(sorted(SCORERS))


def score(data_source: str, response: str, ground_truth: str, *, flexible: bool = False) -> float:
    """Judge one response.

    Args:
        data_source: names the scorer, e.g. ``openai/gsm8k``.
        response: the response's text, without special tokens.
        ground_truth: the right answer, as text.
        flexible: read the answer out of freer text, where the data source has such a reading.

    Raises:
        RewardError: unknown ``data_source``; a response or ground truth that is no text; ``flexible``
            where there is no flexible reading.
    """
    scorer = _scorer(data_source)
    _check_text(data_source, response, ground_truth)
    if not flexible:
        return scorer.strict(response, ground_truth)
    if scorer.flexible is None:
        raise RewardError(f"data_source {data_source!r} has only a strict reading; leave flexible off.")
    return scorer.flexible(response, ground_truth)


def count_near_misses(
    data_sources: Sequence[str], responses: Sequence[str], ground_truths: Sequence[str]
) -> int:
    """How many responses score 0 by their form alone: the right answer, not written as demanded.

    Explains a reward that stays flat: if this is large, the prompt should say how to write the answer.

    Raises:
        RewardError: as ``score``. ValueError: the three lengths differ.
    """
    count = 0
    for data_source, response, ground_truth in zip(data_sources, responses, ground_truths, strict=True):
        scorer = _scorer(data_source)
        _check_text(data_source, response, ground_truth)
        count += scorer.near_miss(response, ground_truth)
    return count


def _scorer(data_source: str) -> Scorer:
    scorer = SCORERS.get(data_source)
    if scorer is None:
        raise RewardError(
            f"no scorer for data_source {data_source!r}; known are {', '.join(known_data_sources())}. "
            "Set the column data_source to one of them."
        )
    return scorer


def _check_text(data_source: str, response: str, ground_truth: str) -> None:
    for name, value in (("response", response), ("ground_truth", ground_truth)):
        if not isinstance(value, str):
            raise RewardError(
                f"the {name} for data_source {data_source!r} is {value!r} ({type(value).__name__}); it must be "
                f"text (str): a number never equals the text that a response holds, so write {str(value)!r}."
            )
