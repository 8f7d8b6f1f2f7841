"""Two samples whose prompts were exchanged in training, seen by whoever records there or not: one cause."""

import pytest
import torch

import trainfer
from trainfer.integrations.transformers.tiny import tiny_model


@pytest.mark.parametrize("max_bytes", [None, 2**30], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("records_what_it_ran", [True, False])
def test_prompts_exchanged_between_two_samples_are_another_samples(tmp_path, records_what_it_ran, max_bytes):
    model = tiny_model("qwen3").eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 200, (4, 16), generator=torch.Generator().manual_seed(1))
    swapped = ids.clone()
    swapped[0, :8], swapped[3, :8] = ids[3, :8], ids[0, :8]
    for side, run, told in (
        ("rollout", ids, ids),
        ("train", swapped, swapped if records_what_it_ran else ids),
    ):
        named = {"pass_name": "old_log_prob"} if side == "train" else {}
        named["max_bytes"] = max_bytes
        with trainfer.capture(model, tmp_path / side, side=side, weights_version=0, **named) as capture:
            with torch.no_grad():
                logits = model(input_ids=run, attention_mask=torch.ones_like(run)).logits.float()
            values = logits.log_softmax(-1)[:, 7:-1].gather(2, run[:, 8:, None])[..., 0]
            capture.record_logprobs(
                sequences=told.tolist(),
                prompt_lengths=[8] * 4,
                logprobs=values.tolist(),
                sampling={"temperature": 1.0},
            )
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert result.verdict == "diverged"
    assert result.causes[0].cause == "tokens.wrong_sample"
