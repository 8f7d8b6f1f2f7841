import copy

import pytest
import torch

from trainfer.engines.registry import make_engine
from trainfer.errors import WeightSyncError
from trainfer.integrations.transformers.load import tiny_model
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.weights import actor_fingerprints, compare_fingerprints, sent_tensors, sync_weights


def actor(**kwargs):
    return tiny_model("qwen3", vocab_size=48, hidden_size=32, intermediate_size=64, **kwargs)


def rollout(model):
    return RolloutWorker(make_engine("builtin", model=model))


class LossyEngine:
    """A builtin engine that changes what arrives on its way."""

    def __init__(self, model, change):
        self._engine = make_engine("builtin", model=model)
        self._change = change

    def load_weights(self, named_tensors, *, version):
        self._engine.load_weights(self._change(dict(named_tensors)).items(), version=version)

    def weight_fingerprints(self):
        return self._engine.weight_fingerprints()


def test_a_sync_brings_every_tensor_and_says_how_many():
    trained, engine_model = actor(seed=1), actor(seed=2)
    proof = sync_weights(trained, rollout(engine_model), version=7, dtype=torch.float32)
    assert proof.matches
    assert proof.weights_version == 7
    names = {name for name, _ in sent_tensors(trained, torch.float32)}
    assert proof.tensors == len(names)
    assert any(name.endswith("inv_freq") for name in names)
    for ours, theirs in zip(trained.parameters(), engine_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_float32_masters_arrive_rounded_once_in_a_bfloat16_engine():
    trained, engine_model = actor(seed=1), actor(seed=2, dtype=torch.bfloat16)
    assert sync_weights(trained, rollout(engine_model), version=1, dtype=torch.bfloat16).matches
    assert torch.equal(trained.lm_head.weight.to(torch.bfloat16), engine_model.lm_head.weight)


def test_a_stale_tensor_is_named():
    stale = actor(seed=2).lm_head.weight
    engine = LossyEngine(actor(seed=2), lambda tensors: {**tensors, "lm_head.weight": stale})
    with pytest.raises(WeightSyncError, match=r"version 3 .* 1 of \d+ tensors .*lm_head\.weight"):
        sync_weights(actor(seed=1), RolloutWorker(engine), version=3, dtype=torch.float32)


def test_a_single_bit_is_enough():
    def flip(tensors):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["model.norm.weight"].view(torch.int32)[3] ^= 1
        return changed

    engine = LossyEngine(actor(seed=2), flip)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        sync_weights(actor(seed=1), RolloutWorker(engine), version=0, dtype=torch.float32)


def test_a_tensor_that_is_not_sent_is_refused_by_the_engine():
    def drop(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    with pytest.raises(WeightSyncError, match=r"lm_head\.weight"):
        sync_weights(actor(), RolloutWorker(LossyEngine(actor(), drop)), version=0, dtype=torch.float32)


def test_a_name_on_one_side_only_is_a_mismatch():
    proof = compare_fingerprints({"a": "1", "b": "2"}, {"b": "2", "c": "3"}, version=0)
    assert proof.mismatched == ("a", "c")
    assert not proof.matches


def test_tied_names_are_all_proven():
    tied = actor()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    names = actor_fingerprints(tied, torch.float32)
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"]
    assert sync_weights(tied, rollout(copy.deepcopy(tied)), version=0, dtype=torch.float32).matches
