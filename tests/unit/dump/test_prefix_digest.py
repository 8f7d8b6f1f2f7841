"""The digest of a prefix depends on every token and its place, and on nothing else."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.check.dump.digest import prefix_digests

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


def by_hand(tokens: list[int]) -> list[int]:
    words = [0, 0]
    for place, token in enumerate(tokens):
        for which, salt in enumerate((0x243F6A8885A308D3, 0x13198A2E03707344)):
            x = (token * 0x9E3779B97F4A7C15 + (place + 1) * 0xD1B54A32D192ED03) % 2**64 ^ salt
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            words[which] = (words[which] + (x ^ x >> 31)) % 2**64
    return words


@settings(deadline=None)
@given(TOKENS)
def test_the_digest_is_the_one_in_the_document(tokens: list[int]):
    assert prefix_digests(np.array(tokens))[-1].tolist() == by_hand(tokens)


@settings(deadline=None)
@given(TOKENS, st.data())
def test_a_sequence_may_be_digested_in_pieces(tokens: list[int], data: st.DataObject):
    cut = data.draw(st.integers(1, len(tokens)))
    whole = prefix_digests(np.array(tokens))
    head = prefix_digests(np.array(tokens[:cut]))
    tail = prefix_digests(np.array(tokens[cut:], dtype=np.int64), first=cut, before=head[-1])
    assert np.array_equal(np.concatenate([head, tail]), whole)


def test_swaps_shifts_repeats_and_lengths_give_other_digests():
    rng = np.random.default_rng(0)
    seen = set()
    base = rng.integers(0, 50, 30)
    variants = [base, base[::-1], base[1:], np.roll(base, 1), np.zeros(5, int), np.zeros(6, int), base + 1]
    for first in range(29):
        swapped = base.copy()
        swapped[[first, first + 1]] = swapped[[first + 1, first]]
        variants.append(swapped)
    distinct = {tuple(variant.tolist()) for variant in variants}
    for variant in distinct:
        seen.add(tuple(prefix_digests(np.array(variant))[-1].tolist()))
    assert len(seen) == len(distinct)
