"""What the second generator's plants do to weights, tokens, log-probs and caches, worked by hand where it can be."""

from typing import Any

import pytest
import torch
from second_cases import changed, planted, unequal

from trainfer.faults.models import LAYERS
from trainfer.faults.records import Batch
from trainfer.faults.second import caches, data_path, scoring
from trainfer.faults.second.planted import FAULTS
from trainfer.faults.sides import run_pair

# --- weights ---------------------------------------------------------------------------------------------------------


def test_a_rollback_brings_the_first_weights_back_at_the_third_step():
    pair, _ = planted("weights.stale/rollback")
    first = {name: value.clone() for name, value in pair.rollout_model.named_parameters()}
    for change in pair.between:
        change(pair, 1)
    assert unequal(pair.rollout_model, pair.train_model) == set()
    for change in pair.between:
        change(pair, 2)
    assert unequal(pair.rollout_model, pair.train_model) == set(first)
    assert unequal(pair.clean, pair.train_model) == set()
    assert all(torch.equal(value, first[name]) for name, value in pair.rollout_model.named_parameters())


def test_half_of_the_shard_s_rows_are_old():
    pair, expected = planted("weights.stale/shard")
    (name,) = unequal(pair.rollout_model, pair.train_model)
    assert name == f"{expected[0].modules[0]}.weight"
    rows = (pair.rollout_model.get_parameter(name) != pair.train_model.get_parameter(name)).any(-1)
    assert rows.tolist() == [True] * (len(rows) // 2) + [False] * (len(rows) // 2)


@pytest.mark.parametrize("name", ["weights.cached_copy/fused_qkv", "weights.cached_copy/head"])
def test_cached_copies_leave_parameters_fresh(name):
    pair, _ = planted(name)
    assert unequal(pair.rollout_model, pair.train_model) == set()


def test_a_merge_on_a_coarse_grid_stays_near():
    pytest.importorskip("peft")
    pair, _ = planted("weights.rounded_merge/cycles")
    for name in unequal(pair.rollout_model, pair.clean):
        exact, rounded = pair.clean.get_parameter(name), pair.rollout_model.get_parameter(name)
        assert torch.equal(rounded, rounded.bfloat16().float())
        assert float((exact - rounded).detach().abs().max()) < 0.05 * float(exact.detach().abs().max())


# --- tokens and log-probs --------------------------------------------------------------------------------------------

BATCH = Batch(tokens=((1, 2, 3, 9, 50), (4, 5, 6, 7, 8, 63)), prompt_lengths=(3, 2))


def test_a_text_round_trip_keeps_the_text_and_changes_tokens():
    text = [letter for token in (1, 2, 3, 50) for letter in data_path.spell(token)]
    again = data_path.again((1, 2, 3, 50))
    assert [letter for token in again for letter in data_path.spell(token)] == text
    assert again != (1, 2, 3, 50)
    assert data_path.again(again) == again
    assert len({data_path.spell(token) for token in range(64)}) == 64


@pytest.mark.parametrize(
    ("change", "tokens", "prompts"),
    [
        (data_path.separator, ((1, 2, 3, 9, 9, 50), (4, 5, 9, 6, 7, 8, 63)), (4, 3)),
        (data_path.padding_kept, ((1, 2, 3, 9, 50), (0, 4, 5, 6, 7, 8, 63)), (3, 3)),
        (data_path.rolled, ((1, 2, 3, 6, 7, 8, 63), (4, 5, 9, 50)), (3, 2)),
        (data_path.short_response, BATCH.tokens, (3, 2)),
        (data_path.last_tokens, BATCH.tokens, (3, 2)),
        (data_path.system, ((11, 12, 13, 14, 3, 9, 50), (11, 12, 13, 14, 6, 7, 8, 63)), (5, 4)),
        (data_path.date, ((1, 3, 3, 9, 50), (4, 6, 6, 7, 8, 63)), (3, 2)),
    ],
)
def test_edits_of_the_data_path_by_hand(change, tokens, prompts):
    made = data_path.edited(change)(BATCH)
    assert (made.tokens, made.prompt_lengths) == (tokens, prompts)


def test_cuts_take_the_end_and_the_start():
    long = Batch(tokens=(tuple(range(1, 20)),), prompt_lengths=(9,))
    assert data_path.edited(data_path.short_response)(long).tokens == (tuple(range(1, 16)),)
    cut = data_path.edited(data_path.last_tokens)(long)
    assert (cut.tokens, cut.prompt_lengths) == ((tuple(range(8, 20)),), (2,))


def test_lists_of_log_probs_move_by_hand():
    lists = [[-1.0, -2.0], [-3.0, -4.0, -5.0, -6.0]]
    assert data_path.in_sorted_order(lists, [], BATCH) == [[-3.0, -4.0], [-1.0, -2.0, 0.0, 0.0]]
    assert data_path.early(lists, [], BATCH) == [[-2.0, 0.0], [-4.0, -5.0, -6.0, 0.0]]
    flat = [torch.zeros(len(tokens), 64) for tokens in BATCH.tokens]
    flat[0][4 - 1, 4] = 5.0
    assert data_path.wrapped(lists, flat, BATCH)[0] == [
        -1.0,
        pytest.approx(float(flat[0][3].log_softmax(-1)[4])),
    ]
    flat[1][0, 5] = 5.0
    assert data_path.from_prompt_end([], flat, BATCH)[1][0] == pytest.approx(
        float(flat[1][0].log_softmax(-1)[5])
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FAULTS
        if name.startswith(("tokens.shifted", "tokens.packing_roll", "tokens.wrong_sample/b"))
    ],
)
def test_named_log_probs_alone_change(name):
    _, expected, rollout, train = changed(name, FAULTS[name].sides[-1])
    gaps = {
        (index, length + place)
        for index, length in enumerate(rollout.batch.prompt_lengths)
        for place, (a, b) in enumerate(zip(rollout.logprobs[index], train.logprobs[index], strict=True))
        if abs(a - b) > 1e-4
    }
    assert expected[0].tokens is not None
    assert gaps <= expected[0].tokens(rollout.batch)
    assert gaps


def test_reads_of_log_probs_by_hand():
    logits = torch.tensor([0.5, 2.0, -1.0, 0.0] + [0.0] * 59 + [3.0])
    every = logits.exp().sum()
    masked = every - logits[[0, 63]].exp().sum()
    assert scoring.without(63, 0)(logits, 1) == pytest.approx(float(2.0 - masked.log()))
    assert scoring.without(63, 0)(logits, 63) == pytest.approx(float(3.0 - (every - logits[0].exp()).log()))
    assert scoring._within(logits, 1, 2) == pytest.approx(float(2.0 - logits[[1, 63]].logsumexp(-1)))
    assert scoring._likeliest(logits, 2) == pytest.approx(float(3.0 - every.log()))
    assert scoring._half(logits, 1) == float((2.0 - every.log()).half())
    assert scoring._entropy(torch.zeros(64), 1) == pytest.approx(float(torch.tensor(64.0).log()))


@pytest.mark.parametrize(
    ("name", "factor"),
    [("logprob.temperature/multiplied", None), ("logprob.scaled_after_softmax/times", 0.6)],
)
def test_both_sides_declare_the_temperature(name, factor):
    pair, _ = planted(name, side="train", magnitude=0.4)
    assert pair.rollout.declared == pair.train.declared == {"temperature": 0.6}
    logits = torch.linspace(-1, 2, 64)
    wanted = factor * logits.log_softmax(-1)[3] if factor else (0.6 * logits).log_softmax(-1)[3]
    assert pair.read["train"](logits, 3) == pytest.approx(float(wanted))


# --- caches ----------------------------------------------------------------------------------------------------------


def test_caches_round_what_they_store():
    pair, _ = planted("kv_cache.quantized/values")
    keys = values = torch.linspace(-1, 1, 8).reshape(1, 1, 2, 4)
    stored = pair.rollout.make_cache(pair.rollout_model).update(keys, values, 0)
    assert torch.equal(stored[0], keys)
    assert torch.equal(stored[1], values.to(torch.float8_e5m2).float())
    pair, _ = planted("kv_cache.quantized/bfloat16")
    stored = pair.rollout.make_cache(pair.rollout_model).update(keys, values, 0)
    assert torch.equal(stored[0], keys.bfloat16().float())


def test_the_first_block_stands_twice_in_one_request():
    pair, _ = planted("kv_cache.seam/block_table")
    cache = pair.rollout.make_cache(pair.rollout_model)
    held = torch.arange(2 * 5.0).reshape(2, 1, 5, 1)
    for layer in range(LAYERS):
        cache.update(held.clone(), held.clone(), layer)
    caches.first_block_twice(cache, 5)
    layer: Any = cache.layers[1]
    assert layer.keys[1, 0, :, 0].tolist() == [5.0, 6.0, 7.0, 5.0, 6.0]
    assert torch.equal(layer.keys[0], held[0])


def test_one_layer_s_prefix_is_old_and_no_other():
    pair, expected = planted("kv_cache.stale_prefix/one_layer")
    assert pair.rollout.prefix_models is not None
    old = pair.rollout.prefix_models[0]
    module = expected[0].modules[0]
    assert {name.rpartition(".")[0] for name in unequal(old, pair.rollout_model)} == {
        f"{module}.k_proj",
        f"{module}.v_proj",
    }


def test_a_cache_that_is_not_reset_is_right_in_its_own_step():
    pair, _ = planted("kv_cache.stale_prefix/not_reset")
    first, second = run_pair(pair)
    gaps = [
        max(
            abs(a - b)
            for mine, other in zip(x.logprobs, y.logprobs, strict=True)
            for a, b in zip(mine, other, strict=True)
        )
        for x, y in (first, second)
    ]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]
    assert unequal(pair.rollout_model, pair.train_model) == set()
