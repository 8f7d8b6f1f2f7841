"""GSM8K: the number after ``####`` equals the ground truth, letter for letter.

Takes response text and ground truth; gives 1.0 or 0.0. The strict and the flexible reading give verl's
scores on every input (its ``utils/reward_score/gsm8k.py``), oddities included: only the last 300
characters are read, ``#### 72.`` is wrong for 72, and the flexible reading keeps thousands commas.
``near_miss`` tells how often such an oddity, not the model's arithmetic, cost the point.
"""

import re
import unicodedata
from decimal import Decimal, InvalidOperation

DATA_SOURCE = "openai/gsm8k"
READ_CHARACTERS = 300
"""The answer stands at the end; longer responses are cut to their last 300 characters."""

_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER_LIKE = re.compile(r"-?[0-9.,]+")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_WRITTEN_NUMBER = re.compile(
    r"(?:(?<![\w)])([+\-−]))?[$€£¥]?(\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)(\.\d+)?"  # sign, currency, whole, fraction
)


def score_strict(response: str, ground_truth: str) -> float:
    """1.0 if the last ``#### NUMBER``, commas removed, is the ground truth; else 0.0."""
    found = _AFTER_HASHES.findall(response[-READ_CHARACTERS:])
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)


def score_flexible(response: str, ground_truth: str) -> float:
    """1.0 if the last thing that looks like a number is the ground truth; else 0.0.

    A lone full stop is passed over, as in verl; a lone comma is not.
    """
    found = _NUMBER_LIKE.findall(response[-READ_CHARACTERS:])
    last = next((text for text in reversed(found) if text != "."), found[0] if found else None)
    return float(last is not None and last == ground_truth)


def near_miss(response: str, ground_truth: str) -> bool:
    r"""True if the strict score is 0 though the answer given is the right number.

    The answer is what follows the last ``####``, else the last ``\boxed{}``, else the last number. It is
    compared by value: currency and plus signs, full-width digits, thousands separators (comma or
    space), a trailing point and trailing zeros do not count.
    """
    if score_strict(response, ground_truth) != 0.0:
        return False
    wanted = _to_number(ground_truth)
    return wanted is not None and _answer_given(response) == wanted


def _answer_given(response: str) -> Decimal | None:
    tail = unicodedata.normalize("NFKC", response[-READ_CHARACTERS:])
    _, hashes, after_hashes = tail.rpartition("####")
    numbers = _numbers(after_hashes) if hashes else []
    if numbers:
        return numbers[0]
    boxed = _BOXED.findall(tail)
    numbers = _numbers(boxed[-1]) if boxed else _numbers(tail)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    return [
        Decimal(("-" if sign in {"-", "−"} else "") + whole.replace(",", "").replace(" ", "") + fraction)
        for sign, whole, fraction in _WRITTEN_NUMBER.findall(text)
    ]


def _to_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
