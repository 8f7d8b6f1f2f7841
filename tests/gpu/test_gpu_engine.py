"""The builtin engine on a CUDA device: what it samples is bit for bit what the training forward scores."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_cases import qwen3_06b, requests_of, sampled, small_model, train_a_step, trained

from trainfer.engines.builtin import gpu_program
from trainfer.engines.builtin.gpu_engine import GpuEngine
from trainfer.engines.builtin.gpu_program import FusedProgram, ModuleProgram
from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.types import FinishReason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("architecture", "program"),
    [("qwen3", FusedProgram), ("qwen2", FusedProgram), ("llama", FusedProgram), ("qwen3", ModuleProgram)],
)
def test_sampled_logprobs_are_the_training_forwards(architecture, program, monkeypatch):
    if program is ModuleProgram:
        monkeypatch.setattr(gpu_program, "FAMILY", frozenset())
    model = small_model(architecture)
    engine = make_engine("builtin", model=model, limits=EngineLimits(max_num_seqs=24))
    assert isinstance(engine, GpuEngine)
    for step in range(3):
        requests = requests_of(12, vocabulary=1000, prompt=(1, 300), new=(1, 150), group=3)
        completions = engine.generate(requests)
        rollout = sampled(completions)
        for micro_batch in (None, 1, 7):
            assert torch.equal(rollout, trained(model, requests, completions, micro_batch)), (
                step,
                micro_batch,
            )
        assert torch.equal(rollout, trained(model, requests, completions, share_prompts=False))
        assert type(engine.program) is program
        train_a_step(model, requests, completions)
        engine.load_weights(model.state_dict().items(), version=step + 1)


def test_tokens_depend_on_the_seed_alone():
    model = small_model("qwen3")
    requests = requests_of(20, vocabulary=1000, prompt=(3, 200), new=(30, 90))
    together = make_engine("builtin", model=model).generate(requests)
    alone = make_engine("builtin", model=model, limits=EngineLimits(max_num_seqs=1))
    few = make_engine("builtin", model=model, limits=EngineLimits(max_num_seqs=3, cache_tokens=512))
    for other in (alone, few):
        assert [c.token_ids for c in other.generate(requests)] == [c.token_ids for c in together]
    reversed_order = make_engine("builtin", model=model).generate(requests[::-1])
    assert [c.logprobs for c in reversed_order[::-1]] == [c.logprobs for c in together]


def test_a_sequence_ends_with_its_stop_token():
    model = small_model("qwen2")
    plain = make_engine("builtin", model=model).generate(
        requests_of(8, vocabulary=1000, prompt=(5, 50), new=(100, 100))
    )
    stops = tuple({completion.token_ids[i] for i, completion in enumerate(plain)})
    stopped = make_engine("builtin", model=model).generate(
        requests_of(8, vocabulary=1000, prompt=(5, 50), new=(100, 100), stop_token_ids=stops)
    )
    for before, after in zip(plain, stopped, strict=True):
        end = next(i for i, token in enumerate(before.token_ids) if token in stops)
        assert after.token_ids == before.token_ids[: end + 1]
        assert after.logprobs == before.logprobs[: end + 1]
        assert after.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "sampling", [{"top_k": 20}, {"top_p": 0.8}, {"temperature": 0.0}, {"temperature": 0.7, "min_p": 0.05}]
)
def test_filters_and_greedy(sampling):
    model = small_model("qwen3")
    requests = requests_of(10, vocabulary=1000, prompt=(3, 100), new=(20, 60), **sampling)
    completions = make_engine("builtin", model=model).generate(requests)
    alone = make_engine("builtin", model=model, limits=EngineLimits(max_num_seqs=1)).generate(requests)
    assert [c.logprobs for c in alone] == [c.logprobs for c in completions]
    if "top_k" not in sampling and "top_p" not in sampling and "min_p" not in sampling:
        assert torch.equal(sampled(completions), trained(model, requests, completions))


def test_the_shape_of_qwen3_06b_at_start_and_after_updates():
    model = qwen3_06b()
    engine = make_engine("builtin", model=model, limits=EngineLimits(max_num_seqs=64))
    for step in range(3):
        requests = requests_of(64 - 7 * step, vocabulary=32000, prompt=(3, 500), new=(64, 64))
        completions = engine.generate(requests)
        rollout = sampled(completions)
        assert rollout.std() > 0.3
        for micro_batch in (None, 1, 16):
            assert torch.equal(rollout, trained(model, requests, completions, micro_batch)), (
                step,
                micro_batch,
            )
        train_a_step(model, requests[:8], completions[:8])


def test_a_watched_model_decodes_by_its_modules_with_the_same_bits():
    model = small_model("qwen3")
    requests = requests_of(6, vocabulary=1000, prompt=(3, 90), new=(5, 40))
    expected = make_engine("builtin", model=model).generate(requests)
    seen: list[int] = []
    handle = model.get_submodule("model.layers.1.mlp.act_fn").register_forward_hook(
        lambda _module, _arguments, output: seen.append(output.shape[1])
    )
    watched = make_engine("builtin", model=model).generate(requests)
    handle.remove()
    assert [c.logprobs for c in watched] == [c.logprobs for c in expected]
    assert [c.token_ids for c in watched] == [c.token_ids for c in expected]
    assert len(seen) == 1 + max(len(c.token_ids) - 1 for c in expected)
