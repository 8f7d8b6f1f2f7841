"""Each plant changes what it says, on the side that it says, and nothing else."""

import dataclasses

import pytest
import torch
from plant_cases import SEQUENCES, introducing, left_padded, watched

from trainfer.faults.catalogue import FAULTS, make_case
from trainfer.faults.models import WINDOW, make_model
from trainfer.faults.pair import Pair, make_pair
from trainfer.faults.plants import tokens as token_plants
from trainfer.faults.plants.kv_cache import Rounded
from trainfer.faults.records import Batch, Case
from trainfer.faults.sides import filtered, log_softmax, mean_gap, padded, run_pair, train_forward

IN_THE_MODEL = [
    name
    for name, fault in FAULTS.items()
    if fault.cause.split(".")[0] in ("norm", "rope", "attention", "head", "moe", "module", "mode")
    and name
    not in (
        "rope.positions/padding",
        "rope.positions/decode",
        "attention.cross_sequence/packed",
        "head.adapter/missing",
    )
] + ["weights.buffer/lost", "weights.missing/bias", "shape.parallel/sums"]
MANY_PLACES = {"norm.eps/all", "norm.cast_order/all", "attention.backend/bf16", "mode.dropout/attention",
               "mode.dropout/modules", "shape.parallel/sums"}  # fmt: skip


def planted(name: str, *, seed: int = 0, layout: str = "left", **changes) -> tuple[Pair, list]:
    case = dataclasses.replace(make_case(FAULTS[name], seed), **changes)
    pair = make_pair(case, layout=layout)
    return pair, list(FAULTS[name].plant(pair))


@pytest.mark.parametrize("name", IN_THE_MODEL)
def test_a_fault_shows_first_in_the_module_that_is_expected(name: str):
    """Equal inputs and other outputs in that module alone; where several are changed, in none before it."""
    pair, expected = planted(name)
    own_mask = name != "attention.window/ignored"  # the model hands its layer another mask
    places = introducing(pair.clean, pair.faulty, pair, masks=own_mask)
    assert places, "the plant changes nothing"
    if name == "module.dtype/bf16":  # the embedding is the first; the projections stand for all that follow
        assert places[0] == "model.embed_tokens"
        return
    assert places[0] == expected[0].modules[0]
    if name not in MANY_PLACES:
        assert places == list(expected[0].modules)


@pytest.mark.parametrize("name", FAULTS)
def test_the_other_side_and_the_reference_stay_as_they_were(name: str):
    pair, _ = planted(name)
    fresh = make_model(pair.case.architecture, seed=pair.seed, dtype=pair.case.dtype)
    other = pair.train_model if pair.case.side == "rollout" else pair.rollout_model
    if "adapter" in name or "merge" in name.partition("/")[0].removeprefix("attention."):
        other = None  # an adapter belongs to the trainer, and its merged weights to the reference
    if name in ("weights.stale/all", "policy.staleness/declared"):
        other = pair.rollout_model
    plain = make_pair(pair.case, layout="right")
    for model in [] if other is None else [other, pair.clean]:
        assert not introducing(fresh, model, plain)
        for (mine, a), (theirs, b) in zip(fresh.named_parameters(), model.named_parameters(), strict=True):
            assert mine == theirs
            assert torch.equal(a, b), mine


def test_a_dtype_reaches_parameters_and_no_buffer():
    model = make_model("qwen3", seed=0, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


# --- rows that a fault touches, counted by hand or by running it -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("attention.cross_sequence/packed", "qwen3"),
        ("attention.window/applied", "llama"),
        ("attention.window/ignored", "gemma2"),
        ("attention.mask/padding", "qwen2"),
        ("attention.mask/causal", "llama"),
        ("attention.merge/lse", "qwen3"),
        ("rope.positions/padding", "gpt2"),
        ("rope.dtype/table", "llama"),
    ],
)
def test_the_rows_that_are_named_are_those_that_change(name: str, architecture: str):
    """Logits of the training forward, row by row, with and without the fault."""
    pair, expected = planted(name, side="train", architecture=architecture, dtype="float32", magnitude=6.0)
    clean = make_pair(pair.case, layout=pair.train.layout)
    batch = Batch(tokens=SEQUENCES, prompt_lengths=(4, 4, 4))
    with torch.no_grad():
        wrong, right = (train_forward(p.train_model, SEQUENCES, p) for p in (pair, clean))
    changed = {
        (s, p)
        for s, (a, b) in enumerate(zip(wrong, right, strict=True))
        for p in range(len(a) - 1)
        if float((a[p] - b[p]).abs().max()) > 1e-6
    }
    assert expected[0].tokens is not None
    assert changed == expected[0].tokens(batch)


BATCH = Batch(
    tokens=(
        (5, 6, 7, 30, 31, 32, 33),
        (5, 6, 7, 34, 35, 36),
        (8, 9, 10, 40, 41, 42, 43, 44, 45),
        tuple(range(11, 24)),
    ),
    prompt_lengths=(3, 3, 3, 8),
)


def edited(plant, seed: int = 0) -> tuple[Batch, set]:
    pair = make_pair(Case(fault="tokens", cause="tokens", seed=seed, architecture="llama", dtype="float32",
                          side="train", layer=0, magnitude=None))  # fmt: skip
    expected = plant(pair)
    assert pair.train.edit is not None
    return pair.train.edit(BATCH), expected[0].tokens(BATCH) if expected[0].tokens else set()


def test_two_tokens_become_one():
    batch, touched = edited(token_plants.plant_retokenized)
    assert batch.tokens[2] == (8, 9, 10, 40, 1, 43, 44, 45)
    assert touched == {(2, 4), (2, 5)}
    assert batch.tokens[:2] == BATCH.tokens[:2]
    assert batch.tokens[3] == BATCH.tokens[3]


def test_a_start_token_moves_every_sequence():
    batch, touched = edited(token_plants.plant_start_inserted)
    assert [tokens[1:] for tokens in batch.tokens] == list(BATCH.tokens)
    assert {tokens[0] for tokens in batch.tokens} == {token_plants.BOS}
    assert batch.prompt_lengths == (4, 4, 4, 9)
    assert touched == {(0, 0), (1, 0), (2, 0), (3, 0)}


def test_responses_change_places_with_their_lengths():
    batch, _ = edited(token_plants.plant_wrong_sample)
    assert batch.tokens[2] == (*range(11, 19), 40, 41, 42, 43, 44, 45)
    assert batch.tokens[3] == (8, 9, 10, *range(19, 24))
    assert batch.prompt_lengths == (3, 3, 8, 3)


def test_cutting_leaves_ten_tokens():
    batch, touched = edited(token_plants.plant_cut_at_the_end)
    assert [len(tokens) for tokens in batch.tokens] == [7, 6, 9, 10]
    assert touched == {(3, 10), (3, 11), (3, 12)}


def test_thinking_goes_from_the_long_prompt_alone():
    batch, touched = edited(token_plants.plant_thinking_dropped)
    assert batch.tokens[:3] == BATCH.tokens[:3]
    assert batch.tokens[3] == (11, 12, *range(16, 24))
    assert batch.prompt_lengths == (3, 3, 3, 5)
    assert touched == {(3, 2), (3, 3), (3, 4)}


def test_the_last_label_of_a_packed_sequence_is_its_neighbours_first_token():
    pair, expected = planted("tokens.packing_roll/labels")
    ((first, second),) = run_pair(pair)
    ((_, right),) = run_pair(make_pair(pair.case, layout="packed"))
    last = {(s, len(tokens) - 1) for s, tokens in enumerate(first.batch.tokens)}
    changed = {
        (s, first.batch.prompt_lengths[s] + i)
        for s, (a, b) in enumerate(zip(second.logprobs, right.logprobs, strict=True))
        for i in range(len(a))
        if a[i] != b[i]
    }
    assert changed == last == expected[0].tokens(first.batch)


# --- caches ----------------------------------------------------------------------------------------------------------


def test_a_rounded_cache_holds_numbers_of_its_grid():
    values = torch.tensor([[0.3, -1.7, 100.0, 0.0011]])
    fp8 = Rounded(torch.float8_e4m3fn, None).round(values)
    assert torch.equal(fp8, torch.tensor([[0.3125, -1.75, 96.0, 0.001953125]])), (
        "e4m3 has three bits of mantissa"
    )
    int8 = Rounded(torch.int8, None).round(values)
    assert torch.equal(int8, torch.tensor([[0.0, -2.0, 127.0, 0.0]]) * (100 / 127)), "one scale a row"


def test_a_stale_prefix_changes_hits_from_the_first_computed_row_on():
    """Rows of prompts that hit come from old keys; the prompt that was first seen after the update is untouched."""
    pair, _ = planted("kv_cache.stale_prefix/hits", architecture="llama", dtype="float32", magnitude=0.1)
    ((first, second),) = run_pair(pair)
    gaps = [
        max(abs(a - b) for a, b in zip(*pairs, strict=True))
        for pairs in zip(first.logprobs, second.logprobs, strict=True)
    ]
    assert all(gap > 1e-3 for gap in gaps[:3])
    assert gaps[3] < 1e-5


@pytest.mark.parametrize("name", ["kv_cache.seam/lost", "kv_cache.seam/shifted"])
def test_a_seam_spoils_what_comes_after_it(name: str):
    pair, _ = planted(name, architecture="qwen3", dtype="float32")
    assert mean_gap(run_pair(pair)) > 1e-3
    pair.rollout.after_chunk = None
    assert mean_gap(run_pair(pair)) < 1e-5, "chunks alone change nothing"


# --- log-probs -------------------------------------------------------------------------------------------------------


def test_raw_and_scaled_log_probs_of_case_17():
    """Logits [2, 1, 0, -1], token 0: -0.4402 raw, -0.1451 at temperature 0.5."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    assert log_softmax(1.0)(logits, 0) == pytest.approx(-0.44019, abs=1e-5)
    assert log_softmax(0.5)(logits, 0) == pytest.approx(-0.14508, abs=1e-5)
    assert log_softmax(1.0, top_k=2)(logits, 0) == pytest.approx(-0.31326, abs=1e-5)


def test_the_nucleus_keeps_the_token_that_crosses_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert torch.isfinite(filtered(logits, top_p=0.7)).tolist() == [True, True, False, False]
    assert torch.isfinite(filtered(logits, top_p=0.81)).tolist() == [True, True, True, False]


# --- several steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_weights_are_stale_from_the_step_that_is_named(seed: int):
    pair, expected = planted("weights.stale/all", seed=seed, magnitude=0.01)
    gaps = [mean_gap([step]) for step in run_pair(pair)]
    bad = expected[0].first_step
    assert max(gaps[:bad]) < 1e-5
    assert min(gaps[bad:]) > 1e-4


def test_only_the_skipped_parameter_is_old():
    pair, expected = planted("weights.stale/one_parameter")
    run_pair(pair)
    theirs = dict(pair.rollout_model.named_parameters())
    differ = [
        name
        for name, parameter in pair.train_model.named_parameters()
        if not torch.equal(parameter, theirs[name])
    ]
    assert len(differ) == 1
    assert differ[0].rpartition(".")[0] == expected[0].modules[0]


def test_a_cached_copy_hides_behind_a_parameter_that_is_new():
    pair, expected = planted("weights.cached_copy/linear", dtype="float32", magnitude=0.1)
    run_pair(pair)
    for (name, a), (_, b) in zip(
        pair.train_model.named_parameters(), pair.rollout_model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert introducing(pair.train_model, pair.rollout_model, pair) == list(expected[0].modules)


def test_padding_and_window_are_what_the_cases_rely_on():
    ids, mask = left_padded()
    assert mask.sum(1).tolist() == [len(tokens) for tokens in SEQUENCES]
    assert padded(SEQUENCES, "right")[0][1, 7:].sum() == 0
    assert max(map(len, SEQUENCES)) > 2 * WINDOW
    pair, _ = planted("norm.eps/one")
    assert "model.layers.1.mlp" in watched(pair.clean, pair)
    assert ids.shape == mask.shape
