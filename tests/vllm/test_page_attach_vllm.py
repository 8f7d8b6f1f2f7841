"""The vLLM block of the page "Attach anything", as it stands there."""

from functools import partial

import pytest
from vllm_cases import folder_of, peaked_model
from vllm_plain import eager_model, plain_llm, stop

import trainfer
from page_code import code_under, statements
from trainfer.engines.vllm.environment import undisturbed


def test_the_vllm_block_gives_two_sides_that_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = code_under("attach-anything.md", "vLLM")
    assert len(statements(code)) <= 5
    folder = folder_of(peaked_model("qwen2"), tmp_path / "model")
    with undisturbed():
        from vllm import SamplingParams
    names = {
        "LLM": partial(plain_llm, enable_prefix_caching=False),
        "folder": folder,
        "model": eager_model(folder),
        "prompts": [{"prompt_token_ids": [7, 8, 9]}, {"prompt_token_ids": list(range(20, 60))}],
        "sampling_params": SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True, detokenize=False),
    }
    try:
        with undisturbed():
            exec(compile(code, "attach-anything.md", "exec"), names)
    finally:
        if "llm" in names:
            stop(names["llm"])
    result = trainfer.compare("dumps/rollout", "dumps/train")
    assert result.verdict in ("equal", "rounding")
    coverage = result.comparison.coverage
    assert coverage.rows_matched == coverage.rows_rollout == 3 + 5 + 40 + 5
    assert coverage.modules_unmatched == ()
    assert names["llm"].llm_engine.vllm_config.parallel_config.worker_extension_cls.endswith(
        "TrainferExtension"
    )
    assert result.document().logprobs.count == pytest.approx(0)  # training recorded none
