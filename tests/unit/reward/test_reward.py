"""Scores against the case strings, verl's own answers and hand-worked values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import DataError, RewardError
from trainfer.train.reward import score
from trainfer.train.reward.registry import count_near_misses, known_data_sources

GSM8K = "openai/gsm8k"
# id, response, ground truth, verl's strict score, near miss (case 28)
CASE_28 = [
    ("a", "Each box holds 12, six boxes hold 72.\n#### 72", "72", 1, False),
    ("b", "#### 72.", "72", 0, True),
    ("c", "#### $72", "72", 0, True),
    ("d", "####72", "72", 0, True),
    ("e", "####  72", "72", 0, True),
    ("f", "#### 1,234", "1234", 1, False),
    ("g", "#### 72.0", "72", 0, True),
    ("h", "#### +3", "3", 0, True),
    ("i", "#### -3", "-3", 1, False),
    ("j", "#### ７２", "72", 0, True),
    ("k", "#### 72。", "72", 1, False),
    ("l", "#### 10\nno, again\n#### 12", "12", 1, False),
    ("m", "\\boxed{72}", "72", 0, True),
    ("n", "#### 1 234", "1234", 0, True),
    ("o", "#### ,", "72", 0, False),
    ("p", "", "72", 0, False),
    ("q", "**#### 72**", "72", 1, False),
]


@pytest.mark.parametrize(
    ("name", "response", "truth", "strict", "near"), CASE_28, ids=[c[0] for c in CASE_28]
)
def test_case_28_scores_and_near_misses(name, response, truth, strict, near):
    assert score(GSM8K, response, truth) == float(strict)
    assert count_near_misses([GSM8K], [response], [truth]) == int(near)


def test_near_misses_of_all_case_strings_are_counted_together():
    responses = [case[1] for case in CASE_28]
    assert count_near_misses([GSM8K] * 17, responses, [case[2] for case in CASE_28]) == 9


def test_only_the_last_300_characters_are_read():
    assert score(GSM8K, "#### 72" + "x" * 293, "72") == 1.0
    assert score(GSM8K, "#### 72" + "x" * 294, "72") == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("It is 72.", "72", 0.0),
        ("It is 72", "72", 1.0),
        ("72 . ", "72", 1.0),
        ("costs 1,234", "1234", 0.0),
        ("\\boxed{72}", "72", 1.0),
        ("72 ,", "72", 0.0),
        ("no number", "72", 0.0),
        ("", "72", 0.0),
        (". .", ".", 1.0),
    ],
)
def test_flexible_reading_takes_the_last_number(response, truth, expected):
    assert score(GSM8K, response, truth, flexible=True) == expected


@pytest.mark.parametrize(
    ("response", "truth", "near"),
    [
        ("The answer is 72 dollars", "72", True),
        ("5 - 3", "3", True),
        ("x = -3.50", "-3.5", True),
        ("#### −3", "-3", True),
        ("#### 71", "72", False),
        ("72 then 71", "72", False),
        ("#### 72", "seventy-two", False),
        ("#### 72", "nan", False),
        ("#### 12 apples, 3 pears", "12", False),
        ("####12 apples, 3 pears", "12", True),
    ],
)
def test_near_miss_compares_values_of_the_answer_given(response, truth, near):
    assert count_near_misses([GSM8K], [response], [truth]) == int(near)


@settings(deadline=None)
@given(st.text(max_size=400), st.one_of(st.text(max_size=8), st.integers(-999, 99999).map(str)))
def test_any_text_scores_zero_or_one_and_a_point_is_never_a_near_miss(response, truth):
    strict = score(GSM8K, response, truth)
    assert strict in {0.0, 1.0}
    assert score(GSM8K, response, truth, flexible=True) in {0.0, 1.0}
    assert count_near_misses([GSM8K], [response], [truth]) + strict <= 1


def test_scores_are_floats():
    assert type(score(GSM8K, "", "1")) is float
    assert type(score("trainfer/letters", "ab", "ab")) is float


@pytest.mark.parametrize("name", ["", "./data/gsm8k", "gsm8k", "OPENAI/GSM8K"])
def test_an_unknown_data_source_is_named_with_the_known_ones(name):
    with pytest.raises(RewardError) as caught:
        score(name, "#### 1", "1")
    assert repr(name) in str(caught.value)
    for known in known_data_sources():
        assert known in str(caught.value)
    assert isinstance(caught.value, DataError)


@pytest.mark.parametrize("truth", [3, 3.0, None, ["3"]])
def test_a_ground_truth_that_is_no_text_is_refused_not_scored_zero(truth):
    with pytest.raises(RewardError, match=r"ground_truth .* must be text"):
        score(GSM8K, "#### 3", truth)


def test_flexible_is_refused_where_there_is_none():
    with pytest.raises(RewardError, match="strict reading"):
        score("trainfer/letters", "ab", "ab", flexible=True)


def test_near_misses_need_equal_lengths():
    with pytest.raises(ValueError, match="zip"):
        count_near_misses([GSM8K], ["#### 1"], [])


def test_letters_want_the_whole_answer():
    assert score("trainfer/letters", "cba", "cba") == 1.0
    assert score("trainfer/letters", " cba\n", "cba") == 1.0
    assert score("trainfer/letters", "cb", "cba") == 0.0
    assert count_near_misses(["trainfer/letters"] * 3, ["C-b-a", "cba", "abc"], ["cba"] * 3) == 1


def test_the_room_loads_no_torch():
    code = "import sys, trainfer.train.reward, trainfer.train.advantage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


GOLDEN = Path(__file__).parents[2] / "golden" / "verl_gsm8k.json"


def golden_rows():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", golden_rows(), ids=lambda row: row["id"])
def test_scores_equal_those_that_verl_gave(row):
    assert score(GSM8K, row["response"], row["ground_truth"]) == row["strict"]
    assert score(GSM8K, row["response"], row["ground_truth"], flexible=True) == row["flexible"]
