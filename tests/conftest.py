"""Fixtures of all tests."""

import pytest

from trainfer.exact.rules import MEASURED, use_key_lengths


@pytest.fixture(autouse=True)
def the_rules_of_a_fresh_process():
    """A run sets the attention rules of its process; the next test starts as in a process of its own."""
    use_key_lengths(MEASURED)
