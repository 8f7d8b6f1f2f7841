"""What engines refuse, and how weights arrive."""

import pytest
import torch
from engine_cases import group_requests, peaked_model
from torch import nn

from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.engines.scripted.engine import ScriptedAnswer
from trainfer.errors import EngineError, WeightSyncError
from trainfer.exact.fingerprint import fingerprint
from trainfer.integrations.transformers.load import tiny_model
from trainfer.types import FinishReason, GenerationRequest, SamplingParams


def request(prompt: tuple[int, ...] = (5, 6), **sampling: float) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 4, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(request_id="a", prompt_ids=prompt, seed=0, sampling=params)


@pytest.mark.parametrize("name", ["builtin", "hf"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(()), "empty prompt"),
        (request((5, 300)), r"prompt token 300 .* vocabulary of 261"),
        (request((5, -1)), r"prompt token -1"),
        (request((5,) * 40), r"40 prompt tokens and 4 new ones make 44.* 40 positions"),
        (request((5,) * 37), r"make 41"),
        (request(max_new_tokens=0), "max_new_tokens is 0; it must be at least 1"),
        (request(temperature=-1.0), "temperature is -1.0"),
        (request(temperature=float("nan")), "temperature is nan"),
        (request(top_k=0), "top_k is 0"),
        (request(top_p=0.0), "top_p is 0.0"),
        (request(top_p=1.5), "top_p is 1.5"),
        (request(min_p=2.0), "min_p is 2.0"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused_before_anything_runs(name, bad, message):
    model = tiny_model("qwen2", max_positions=40)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(EngineError, match=f"request 'a'.*{message}"):
        make_engine(name, model=model).generate([request(), bad])
    assert not calls


@pytest.mark.parametrize("name", ["builtin", "hf"])
def test_the_last_position_of_the_model_can_be_used(name):
    model = tiny_model("gpt2", max_positions=40)
    (completion,) = make_engine(name, model=model).generate([request((5,) * 36)])
    assert len(completion.token_ids) == 4


def test_a_request_beyond_the_cache_is_refused():
    engine = make_engine("builtin", model=tiny_model("qwen2"), limits=EngineLimits(cache_tokens=32))
    with pytest.raises(EngineError, match="needs 34 tokens of cache, there are 32"):
        engine.generate([request((5,) * 30)])
    assert len(engine.generate([request((5,) * 28)])[0].token_ids) == 4


def test_the_cache_holds_whole_blocks_only():
    limits = EngineLimits(cache_tokens=32, block_size=7)
    engine = make_engine("builtin", model=tiny_model("qwen2"), limits=limits)
    with pytest.raises(EngineError, match="needs 29 tokens of cache, there are 28"):
        engine.generate([request((5,) * 25)])
    assert len(engine.generate([request((5,) * 24)])[0].token_ids) == 4


@pytest.mark.parametrize("name", ["builtin", "hf"])
@pytest.mark.parametrize("vocab_size", [261, 10_000])
def test_logits_that_are_not_finite_are_an_error_not_a_token(name, vocab_size):
    model = tiny_model("qwen2", vocab_size=vocab_size)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="logits are not finite"):
        make_engine(name, model=model).generate([request()])


def test_no_request_is_no_completion():
    for name in ("builtin", "hf"):
        assert make_engine(name, model=tiny_model("qwen2")).generate([]) == []


@pytest.mark.parametrize("name", ["builtin", "hf"])
def test_new_weights_are_used_and_counted(name):
    requests = group_requests(3, 2, SamplingParams(max_new_tokens=12))
    engine = make_engine(name, model=peaked_model("qwen3"))
    before = engine.generate(requests)
    source = peaked_model("qwen3")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.1)
    engine.load_weights(source.state_dict().items(), version=3)
    after = engine.generate(requests)
    assert engine.weights_version == 3
    assert {c.weights_version for c in after} == {3}
    assert [c.logprobs for c in after] != [c.logprobs for c in before]
    assert after == make_engine(name, model=source, weights_version=3).generate(requests)
    expected = {name: fingerprint(tensor) for name, tensor in source.named_parameters()}
    assert engine.weight_fingerprints().items() >= expected.items()


def test_stale_keys_that_are_not_finite_do_not_outlive_their_weights():
    engine = make_engine("builtin", model=peaked_model("qwen2"))
    good = {name: tensor.clone() for name, tensor in peaked_model("qwen2").state_dict().items()}
    expected = engine.generate([request((5,) * 20)])
    bad = {name: tensor * float("nan") for name, tensor in good.items()}
    engine.load_weights(bad.items(), version=1)
    with pytest.raises(EngineError, match="not finite"):
        engine.generate([request((5,) * 30)])
    engine.load_weights(good.items(), version=0)
    assert engine.generate([request((5,) * 20)]) == expected


def test_generating_leaves_mode_attention_and_weights_as_they_were():
    for name in ("builtin", "hf"):
        model = tiny_model("llama").train()
        model.model.layers[0].eval()
        before = {key: fingerprint(tensor) for key, tensor in model.state_dict().items()}
        engine = make_engine(name, model=model)
        engine.generate([request()])
        assert model.training
        assert model.model.layers[1].mlp.training
        assert not model.model.layers[0].mlp.training
        assert model.config._attn_implementation == "trainfer"
        assert {key: fingerprint(tensor) for key, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize("name", ["builtin", "hf"])
def test_partial_or_wrong_weights_are_refused_and_sampling_stops_until_a_whole_set_came(name):
    model = tiny_model("qwen2")
    engine = make_engine(name, model=model)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    some = dict(list(state.items())[:-2])
    with pytest.raises(WeightSyncError, match=r"missing: lm_head.weight, model.norm.weight"):
        engine.load_weights(some.items(), version=1)
    with pytest.raises(EngineError, match="partial set"):
        engine.generate([request()])
    with pytest.raises(WeightSyncError, match="'extra' has no place"):
        engine.load_weights({**state, "extra": torch.ones(1)}.items(), version=1)
    with pytest.raises(WeightSyncError, match=r"'model.norm.weight' has shape \(3,\).*needs \(64,\)"):
        engine.load_weights({**state, "model.norm.weight": torch.ones(3)}.items(), version=1)
    engine.load_weights(state.items(), version=2)
    assert engine.generate([request()])[0].weights_version == 2


def test_tied_names_may_come_once_or_twice_but_not_differ():
    model = tiny_model("gpt2")
    engine = make_engine("builtin", model=model)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert "lm_head.weight" in engine.weight_fingerprints()
    one = {key: tensor for key, tensor in state.items() if key != "lm_head.weight"}
    engine.load_weights(one.items(), version=1)
    engine.load_weights(state.items(), version=2)
    with pytest.raises(WeightSyncError, match="tied"):
        engine.load_weights({**state, "lm_head.weight": state["lm_head.weight"] + 1}.items(), version=3)


def test_fingerprints_cover_buffers_that_are_not_persistent():
    names = make_engine("builtin", model=tiny_model("qwen3")).weight_fingerprints()
    assert "model.rotary_emb.inv_freq" in names


def test_tokens_are_reported_as_they_come():
    for name in ("builtin", "hf"):
        counts: list[int] = []
        requests = group_requests(3, 2, SamplingParams(max_new_tokens=9, stop_token_ids=(7, 8)))
        done = make_engine(name, model=peaked_model("qwen2")).generate(requests, on_tokens=counts.append)
        assert sum(counts) == sum(len(c.token_ids) for c in done)


def test_the_registry_names_what_it_knows():
    with pytest.raises(EngineError, match=r"no engine is called 'sglang'.*builtin, hf, scripted, vllm"):
        make_engine("sglang", model=tiny_model("qwen2"))
    with pytest.raises(EngineError, match="needs settings with a model folder"):
        make_engine("vllm", model=tiny_model("qwen2"))
    with pytest.raises(EngineError, match="needs a model"):
        make_engine("builtin")
    with pytest.raises(EngineError, match="needs answers"):
        make_engine("scripted")
    for name in ("builtin", "hf"):
        with pytest.raises(EngineError, match="Linear"):
            make_engine(name, model=nn.Linear(2, 2))


def test_a_script_answers_in_order_then_ends():
    answers = [
        ScriptedAnswer(token_ids=(7, 1), logprobs=(-0.5, -0.1)),
        ScriptedAnswer(token_ids=(9,), logprobs=(-1.0,), finish_reason=FinishReason.LENGTH),
    ]
    engine = make_engine("scripted", answers=answers)
    first, second = engine.generate([request(), request()])
    assert (first.token_ids, first.finish_reason) == ((7, 1), FinishReason.STOP)
    assert (second.logprobs, second.finish_reason) == ((-1.0,), FinishReason.LENGTH)
    with pytest.raises(EngineError, match="2 answers are used up"):
        engine.generate([request()])


def test_a_script_may_be_a_function_and_must_be_whole():
    engine = make_engine(
        "scripted", answers=lambda asked: ScriptedAnswer(token_ids=asked.prompt_ids, logprobs=(0.0,))
    )
    assert engine.generate([request((5,))])[0].token_ids == (5,)
    with pytest.raises(EngineError, match="2 tokens and 1 log-probs"):
        engine.generate([request((5, 6))])
    endless = make_engine("scripted", answers=[ScriptedAnswer(token_ids=(7,) * 5, logprobs=(0.0,) * 5)])
    with pytest.raises(EngineError, match="5 tokens, and at most 4 may be sampled"):
        endless.generate([request((5,))])
    weight = torch.ones(3)
    engine.load_weights([("w", weight)], version=4)
    assert (engine.weights_version, engine.weight_fingerprints()) == (4, {"w": fingerprint(weight)})
