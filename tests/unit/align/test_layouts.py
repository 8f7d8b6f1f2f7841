"""Fused layouts and shards as columns; names; fingerprints of shards."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.check.align.layouts import columns
from trainfer.check.align.names import canonical, name_map
from trainfer.check.align.weights import add_fingerprints


def test_blocks_follow_one_another():
    assert [columns("blocks", (4, 2, 2), place, 8) for place in range(3)] == [((0, 4),), ((4, 6),), ((6, 8),)]


def test_blocks_of_one_rank_of_two_are_half_as_wide():
    assert [columns("blocks", (4, 2, 2), place, 4) for place in range(3)] == [((0, 2),), ((2, 3),), ((3, 4),)]


def test_grouped_queries_lie_with_their_key():
    """4 query and 2 key heads of size 1: q q k v, q q k v."""
    assert columns("grouped", (4, 2, 2), 0, 8, 1) == ((0, 2), (4, 6))
    assert columns("grouped", (4, 2, 2), 1, 8, 1) == ((2, 3), (6, 7))
    assert columns("grouped", (4, 2, 2), 2, 8, 1) == ((3, 4), (7, 8))


def test_alternating_halves_take_turns():
    assert columns("alternating", (2, 2), 1, 4) == ((1, 2), (3, 4))


def test_a_layout_that_cannot_be_has_no_columns():
    assert columns("grouped", (4, 2, 2), 0, 8) == ()
    assert columns("alternating", (4, 2, 2), 0, 8) == ()
    assert columns("blocks", (4, 2, 2), 0, 7) == ()


@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 8]), st.sampled_from(["blocks", "grouped"])
)
@settings(deadline=None)
def test_the_parts_cover_the_whole_once(kv_heads: int, group: int, size: int, layout: str):
    widths = (kv_heads * group * size, kv_heads * size, kv_heads * size)
    taken = [
        column
        for place in range(3)
        for start, stop in columns(layout, widths, place, sum(widths), size)
        for column in range(start, stop)
    ]
    assert sorted(taken) == list(range(sum(widths)))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("_orig_mod.model.layers.0._fsdp_wrapped_module.mlp", "model.layers.0.mlp"),
        ("module.model.norm", "model.norm"),
        ("base_model.model.model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj"),
        ("decoder.layers.1.self_attention.linear_proj", "model.layers.1.self_attn.o_proj"),
        ("decoder.final_layernorm", "model.norm"),
        ("logits_processor", "lm_head"),
        ("model.layers.0.module_list", "model.layers.0.module_list"),
        ("", ""),
    ],
)
def test_names_are_those_of_transformers(name: str, wanted: str):
    assert canonical(name, name_map()) == wanted


def test_shards_fingerprints_add_up():
    assert add_fingerprints(["float32:2:" + "f" * 32, "float32:3:" + "0" * 15 + "2" + "0" * 15 + "1"]) == (
        "float32:5:" + "0" * 15 + "1" + "0" * 16
    )
