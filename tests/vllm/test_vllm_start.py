"""What is found out before the first request: the meaning of log-probs, memory, what the kernels can do."""

import pytest
import torch
from vllm_cases import folder_of, gaps, peaked_model, reload, requests, settings, start

from trainfer.engines.registry import make_engine
from trainfer.errors import EngineError
from trainfer.integrations.transformers.load import tiny_model
from trainfer.types import SamplingParams
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.weights import sync_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(peaked_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


def with_arguments(monkeypatch, **changes):
    """Start vLLM with other arguments than trainfer's."""
    from trainfer.engines.vllm import engine, start

    monkeypatch.setattr(engine, "llm_arguments", lambda given: {**start.llm_arguments(given), **changes})


@pytest.fixture(autouse=True)
def _vllm_is_imported(folder):
    """Its module reads the environment at import, so the registry imports it once before anything is patched."""
    with pytest.raises(EngineError):
        make_engine("vllm", vllm=settings(folder / "nowhere"))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "raw_logits"])
def test_a_vllm_that_reports_other_logprobs_than_it_samples_from_does_not_start(folder, monkeypatch, mode):
    with_arguments(monkeypatch, logprobs_mode=mode)
    with pytest.raises(EngineError, match="not those of the distribution it samples"):
        start(folder)


def test_a_model_that_knows_nothing_leaves_the_check_to_the_mode_that_vllm_names(
    tmp_path_factory, monkeypatch
):
    flat = peaked_model("qwen3")
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    folder = folder_of(flat, tmp_path_factory.mktemp("flat"))
    start(folder).close()
    with_arguments(monkeypatch, logprobs_mode="raw_logprobs")
    with pytest.raises(
        EngineError, match="logprobs_mode=processed_logprobs was expected, it gave raw_logprobs"
    ):
        start(folder)


def test_heads_that_vllms_kernels_do_not_know_are_told_with_the_remedy(tmp_path_factory):
    small = folder_of(tiny_model("qwen3", num_heads=4), tmp_path_factory.mktemp("small"))
    with pytest.raises(EngineError, match=r"head_dim=16.*rollout\.name=builtin"):
        start(small)


def test_too_little_memory_is_told_with_the_keys_that_help(folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
    with pytest.raises(EngineError, match=r"too little memory .*VLLM_CPU_KVCACHE_SPACE"):
        start(folder)


def test_an_engine_process_of_vllms_own_is_refused(folder, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING is set to '1'"):
        start(folder)


def test_prompts_that_do_not_fit_into_one_step_together_are_sampled_by_their_seeds(folder):
    asked = requests(12, 1, SamplingParams(max_new_tokens=4))
    assert sum(len(request.prompt_ids) for request in asked) > 200
    engine = start(folder, max_num_batched_tokens=64, max_num_seqs=16)
    completions = engine.generate(asked)
    engine.close()
    assert gaps(reload(folder), asked, completions).max() <= 2e-5


def test_variables_of_the_user_stay_and_vllms_own_do_not_leak(folder, monkeypatch):
    import os

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    start(folder).close()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "CRITICAL"
    assert "LOCAL_WORLD_SIZE" not in os.environ


@pytest.mark.slow
def test_two_shards_sample_and_are_proven_as_one(tmp_path_factory):
    folder = folder_of(peaked_model("qwen3", tied=True), tmp_path_factory.mktemp("shards"))
    model = reload(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
        model.get_input_embeddings().weight.mul_(1.1)
    engine = start(folder, tensor_parallel_size=2)
    try:
        assert sync_weights(model, RolloutWorker(engine), version=1, dtype=torch.float32).matches
        asked = requests(5, 3, SamplingParams(max_new_tokens=30))
        assert gaps(model, asked, engine.generate(asked)).max() <= 2e-5
    finally:
        engine.close()
