"""The quick parser of overrides gives what Hydra's own parser gives, for whatever it takes on itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.config.overrides import parse_overrides
from trainfer.config.quick_overrides import _plain, parse_overrides_quickly
from trainfer.errors import ConfigError

KEYS = st.from_regex(r"\A[+]{0,2}[a-z_]{1,4}(\.[a-z_0-9]{1,4}){0,2}\Z")
VALUES = st.one_of(
    st.from_regex(r"\A[-+0-9a-zA-Z_./:]{0,12}\Z"),
    st.sampled_from(["1e3", "1.0", ".5", "5.", "nan", "Inf", "TRUE", "nUll", "-0", "00", "1_000", "0x10", "a.b", "..", ".", "-", "e5", "_", "1a"]),
    st.integers().map(str),
)  # fmt: skip


def outcome(parse, text):
    try:
        (override,) = parse([text])
    except ConfigError:
        return "refused"
    return override


@given(KEYS, VALUES)
@settings(deadline=None, max_examples=400)
def test_both_parsers_agree(key, value):
    text = f"{key}={value}"
    quick, hydra = outcome(parse_overrides_quickly, text), outcome(parse_overrides, text)
    assert repr(quick) == repr(hydra)


@pytest.mark.parametrize(
    "text", ["a.b=8", "+a=true", "++a.b_c=./data/train.parquet", "a=null", "a=token-mean", "a=-1"]
)
def test_what_launch_scripts_hold_needs_no_hydra(text):
    assert _plain(text) is not None


@pytest.mark.parametrize("text", ["a=[1,2]", "a='x y'", "~a", "a=1.5", "a={b:1}", "a=1,2", "a=${b}", "a=b@c"])
def test_everything_else_is_left_to_hydra(text):
    assert _plain(text) is None
