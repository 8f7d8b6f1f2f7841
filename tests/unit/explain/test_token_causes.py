"""Causes of unlike ids, from their shape and their text."""

import pytest

from trainfer.check.align.edits import edit_script, lag
from trainfer.check.compare.records import TokenFinding
from trainfer.check.dump.records import SequenceRecord
from trainfer.check.explain.fixes import fix_for
from trainfer.check.explain.tokens import token_causes


def record(tokens, prompt: int = 2) -> SequenceRecord:
    return SequenceRecord(
        index=0, tokens=tuple(tokens), prompt_length=prompt, logprobs=(), sampling={}, weights_version=0, step=0, pass_name="decode"
    )  # fmt: skip


def finding(first, second, *, prompt: int = 2) -> TokenFinding:
    return TokenFinding(
        kind="sides",
        sequence=0,
        edits=edit_script(first, second),
        first=record(first, prompt),
        second=record(second, prompt),
        lag=lag(first, second),
    )


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 9], "tokens.shifted"),
        ([1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 5, 6], "tokens.inserted"),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4], "tokens.truncated"),
        ([1, 2, 3, 4, 5, 6], [4, 5, 6], "tokens.truncated"),
        ([1, 2, 3, 4, 5, 6], [1, 2, 5, 6], "tokens.template"),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 5, 6], "tokens.template"),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8, 5, 6], "tokens.retokenized"),
    ],
)
def test_the_shape_of_the_difference_names_the_cause(first, second, cause: str):
    (found,) = token_causes([finding(first, second)], None)
    assert found.cause == cause
    assert found.fix == fix_for(cause)


def test_equal_texts_prove_a_retokenised_response():
    texts = {1: "a", 2: "b", 3: "he", 4: "llo", 5: "hello"}

    def decode(ids) -> str:
        return "".join(texts[token] for token in ids)

    (found,) = token_causes([finding([1, 2, 3, 4], [1, 2, 5])], decode)
    assert (found.cause, found.confirmed) == ("tokens.retokenized", True)
    assert "the texts are equal" in found.evidence


def test_many_sequences_are_one_cause_with_a_count():
    (found,) = token_causes([finding([1, 2, 3, 4], [1, 2, 9, 4]) for _ in range(9)], None)
    assert found.evidence[4] == "and 5 more sequences"
