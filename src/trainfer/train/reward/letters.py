"""The demonstration's task: letters written in another order.

Takes response text and ground truth; gives 1.0 where they are equal, spaces at the ends aside,
else 0.0. No credit for a part, so that the curve shows whole answers learnt.
"""

DATA_SOURCE = "trainfer/letters"


def score(response: str, ground_truth: str) -> float:
    """1.0 if the response is the ground truth, else 0.0."""
    return float(response.strip() == ground_truth)


def near_miss(response: str, ground_truth: str) -> bool:
    """True if the score is 0 though the letters alone, in lower case, are the right ones."""
    letters_given = "".join(character for character in response if character.isalpha()).lower()
    return score(response, ground_truth) == 0.0 and letters_given == ground_truth.lower() != ""
