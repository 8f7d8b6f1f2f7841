import json
import math

import pytest

from trainfer.train.journal.rollouts import (
    RolloutRecord,
    remove_rollouts_after,
    write_rollouts,
)
from trainfer.types import FinishReason, Message, Prompt, SampledSequence, SamplingParams


def record(text="4 </script>\u2028", score=1.0, logprobs=(-0.1, -2.5)):
    prompt = Prompt(
        index=7,
        data_source="demo",
        messages=(Message(role="user", content="2 + 2?"),),
        token_ids=(5, 6),
        ground_truth="4",
    )
    sequence = SampledSequence(
        prompt=prompt,
        sample_index=1,
        group=0,
        seed=2**63 + 1,
        sampling=SamplingParams(max_new_tokens=8, top_p=0.9),
        response_ids=(9, 1),
        response_text=text,
        rollout_logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        weights_version=3,
    )
    return RolloutRecord(sequence=sequence, score=score, advantage=0.5, train_logprobs=logprobs)


def test_a_record_keeps_text_ids_seed_and_exact_floats(tmp_path):
    path = write_rollouts(tmp_path / "rollouts", 12, [record(), record(text="\ud800 lone surrogate")])
    assert path.name == "12.jsonl"
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 3
    first = json.loads(lines[0])
    assert first["step"] == 12
    assert first["messages"] == [{"role": "user", "content": "2 + 2?"}]
    assert first["response"] == "4 </script>\u2028"
    assert first["seed"] == 2**63 + 1
    assert first["response_ids"] == [9, 1]
    assert first["rollout_logprobs"] == first["train_logprobs"] == [-0.1, -2.5]
    assert (first["score"], first["advantage"], first["finish_reason"]) == (1.0, 0.5, "stop")
    assert first["sampling"]["top_p"] == 0.9


def test_a_non_finite_logprob_keeps_its_place(tmp_path):
    path = write_rollouts(tmp_path / "rollouts", 1, [record(logprobs=(-math.inf, -2.5))])
    read = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert read["rollout_logprobs"] == ["-inf", -2.5]


def test_a_failing_source_leaves_no_file(tmp_path):
    def records():
        yield record()
        raise ValueError("the source failed")

    with pytest.raises(ValueError, match="the source failed"):
        write_rollouts(tmp_path / "rollouts", 1, records())
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_resuming_cuts_later_steps_and_nothing_else(tmp_path):
    folder = tmp_path / "rollouts"
    for step in (1, 2, 10):
        write_rollouts(folder, step, [record()])
    write_rollouts(folder, 10, [record()], validation=True)
    (folder / "notes.txt").write_text("mine")
    remove_rollouts_after(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["1.jsonl", "2.jsonl", "notes.txt"]


def test_an_unwritable_folder_is_a_warning_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("a file")
    assert write_rollouts(tmp_path / "rollouts", 1, [record()]) is None
    assert "1.jsonl was not written" in caplog.text
