"""bfloat16 vLLM against bfloat16 Transformers on the same weights: a real mismatch that is rounding, and whose it is."""

import pytest
import torch
from vllm_cases import folder_of, peaked_model
from vllm_plain import answers, plain_llm, stop, train_side

import trainfer
from trainfer.integrations.transformers.load import load_model

PROMPTS = [[7, 8, 9], [200 - i for i in range(18)], list(range(20, 70)), [5] * 9]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = folder_of(
        peaked_model("qwen3", dtype=torch.bfloat16), tmp_path_factory.mktemp("qwen3") / "model"
    )
    llm = plain_llm(folder, dtype="bfloat16")
    dumps = tmp_path_factory.mktemp("dumps")
    with trainfer.capture(llm, dumps / "rollout", side="rollout"):
        outputs = answers(llm, PROMPTS, tokens=24)
    stop(llm)
    train_side(
        load_model(folder, dtype=torch.bfloat16, device="cpu", attention="sdpa"), dumps / "train", outputs
    )
    return trainfer.compare(dumps / "rollout", dumps / "train", model=folder)


def test_it_is_rounding_with_its_modules_ranked(pair):
    result = pair
    assert result.verdict == "rounding", result.summary()
    assert "times its measured noise floor" in result.summary()
    assert result.causes == ()
    assert all(max(module.factors) < 1 for module in result.replay.modules)
    kinds = {name.rpartition(".")[2] for name in result.replay.not_replayed}
    assert kinds == {"act_fn", "rotary_emb"}, "vLLM computes these inside others"
    ranked = sorted(result.replay.modules, key=lambda module: -max(module.factors))
    assert "norm" in [module.operator for module in ranked[:3]]
    # vLLM adds the residual and normalises in one kernel: what reaches these norms was rounded once more.
    behind = [
        module for module in ranked if module.module.endswith(("post_attention_layernorm", "model.norm"))
    ]
    assert len(behind) == 3
    for module in behind:
        assert module.introduced_rollout.mean() > module.introduced_train.mean()


def test_the_mismatch_is_real(pair):
    logprobs = pair.document().logprobs
    assert logprobs.count == 4 * 24
    assert 1e-3 < logprobs.abs_diff_mean < 3e-2
    assert pair.comparison.coverage.rows_matched == pair.comparison.coverage.rows_rollout
