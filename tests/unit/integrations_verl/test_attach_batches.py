"""What is read from a micro-batch of verl 0.9.1, by hand: lengths, log-probs, parts of a packed row, sampling."""

import math
from types import SimpleNamespace

import pytest
import torch

from trainfer.check.probe.given import Rows
from trainfer.check.probe.rows import RowTracker
from trainfer.integrations.verl.requests import sampling_of
from trainfer.integrations.verl.v091_batch import flag, packed_part, read_micro_batch, response_logprobs


def _nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_a_batch_of_the_v1_trainer_is_read_with_its_names_and_padding_sequences():
    batch = {
        "input_ids": _nested([[5, 6, 7, 8], [9, 9]]),
        "responses": _nested([[7, 8], [9]]),
        "response_mask": _nested([[1, 1], [0]]),
        "temperature": 0.5,
        "uid": ["a", "b"],
        "session_id": [0, 1],
    }
    read = read_micro_batch(batch)
    assert read.sequences == [[5, 6, 7, 8], [9, 9]]
    assert read.prompt_lengths == [2, 1]
    assert read.names == ["a/0", "b/1"]
    assert read.temperatures == [0.5, 0.5]
    assert read.real == [True, False]
    values = response_logprobs(read, _nested([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0]]))
    assert values == [[-2.0, -3.0], [-5.0]]  # value j scores token j + 1
    assert read.prompts().sequences == [[5, 6], [9]]


def test_a_batch_of_the_older_trainer_counts_responses_by_its_attention_mask():
    batch = {
        "input_ids": _nested([[5, 6, 7], [8, 9]]),
        "responses": torch.tensor([[6, 7], [9, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "temperature": torch.tensor([1.0, 0.7]),
    }
    read = read_micro_batch(batch)
    assert read.response_lengths == [2, 1]
    assert read.names is None
    assert read.temperatures == pytest.approx([1.0, 0.7])


def test_the_parts_of_a_packed_row_have_the_keys_of_the_whole():
    sequences = [[5, 6, 7], [8, 9]]
    tracker = RowTracker()
    whole = tracker.from_rows(Rows(token_ids=[5, 6, 7, 8, 9], sequence_lengths=[3, 2]), 5)
    digests = []
    for rank in range(3):
        part = packed_part(sequences, rank=rank, parts=3, width=2)
        rows = Rows(
            token_ids=part.token_ids,
            requests=part.requests,
            positions=part.positions,
            prefixes=part.prefixes,
        )
        table = RowTracker().from_rows(rows, 2)
        digests += [tuple(slot["digest"]) for slot in table.slots if slot["position"] >= 0]
    assert digests == [tuple(slot["digest"]) for slot in whole.slots]


def test_settings_travel_in_a_batch_or_beside_the_names_of_one():
    meta = SimpleNamespace(extra_info={"no_lora_adapter": True})
    assert flag(meta, "no_lora_adapter", default=False)
    assert not flag({"no_lora_adapter": False}, "no_lora_adapter", default=True)
    assert flag({}, "use_remove_padding", default=True)


@pytest.mark.parametrize(
    ("mode", "temperature", "top_k"),
    [("processed_logprobs", 0.7, 20), ("raw_logprobs", 1.0, -1), ("", 1.0, -1)],
)
def test_what_was_applied_to_recorded_logprobs_follows_vllms_mode(mode, temperature, top_k):
    applied = sampling_of({"temperature": 0.7, "top_k": 20}, mode)
    assert applied["temperature"] == temperature
    assert applied["top_k"] == top_k
    assert not math.isnan(sum(applied.values()))
