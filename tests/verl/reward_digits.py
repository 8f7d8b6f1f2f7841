"""A reward that differs between samples: a random model is never right, and equal rewards give no gradient at all."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    """The share of digits in the response."""
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
