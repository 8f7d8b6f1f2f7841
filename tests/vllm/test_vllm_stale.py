"""Case 19: inference keeps old weights. The proof ends the run at the sync; where there is none, the dumps tell."""

import json

import pytest
import torch
from vllm_cases import disturb, folder_of, peaked_model, reload, requests, start
from vllm_plain import eager_model

import trainfer
from trainfer.errors import WeightSyncError
from trainfer.types import SamplingParams
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.weights import sync_weights

CASE_19 = {"learning_rate": 0.01, "steps": 5, "fault": "skip_weight_sync", "from_step": 3}
"""Inference keeps the weights of step 2; the learning rate is large on purpose."""


class Skipping:
    """An engine that says it took the weights."""

    def __init__(self, engine):
        self.engine = engine

    def load_weights(self, named_tensors, *, version):
        self.engine._weights_version = version
        for _ in named_tensors:
            pass

    def weight_fingerprints(self):
        return self.engine.weight_fingerprints()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = folder_of(peaked_model("qwen2"), tmp_path_factory.mktemp("qwen2"))
    engine = start(folder)
    yield folder, engine
    engine.close()


def sync(model, engine, version):
    return sync_weights(model, RolloutWorker(engine), version=version, dtype=torch.float32)


def compare_step(folder, engine, model, path, version):
    """One step's captures of both sides, both claiming ``version``."""
    asked = requests(3, 2, SamplingParams(max_new_tokens=8))
    with trainfer.capture(engine.llm, path / "rollout", side="rollout", weights_version=version):
        completions = engine.generate(asked)
    eager = eager_model(folder)
    eager.load_state_dict(model.state_dict())
    with (
        trainfer.capture(
            eager, path / "train", side="train", pass_name="old_log_prob", weights_version=version
        ) as capture,
        torch.no_grad(),
    ):
        for request, completion in zip(asked, completions, strict=True):
            ids, length = (
                torch.tensor([[*request.prompt_ids, *completion.token_ids]]),
                len(request.prompt_ids),
            )
            logprobs = eager(input_ids=ids).logits.log_softmax(-1)[0, length - 1 : -1]
            chosen = logprobs.gather(-1, ids[0, length:, None])[:, 0]
            capture.record_logprobs(
                sequences=ids.tolist(), prompt_lengths=[length], logprobs=[chosen.tolist()]
            )
    trainfer.compare(path / "rollout", path / "train").write(path)
    return json.loads((path / "result.json").read_text())


@pytest.mark.parametrize("has_fault", [True, False], ids=["skipped", "control"])
def test_case_19_stale_weights_end_the_run_at_the_sync_and_are_named_by_the_dumps(
    served, tmp_path, has_fault
):
    folder, engine = served
    model = reload(folder)
    for step in range(1, CASE_19["steps"] + 1):
        disturb(model, seed=step, size=CASE_19["learning_rate"])
        if has_fault and step >= CASE_19["from_step"]:
            with pytest.raises(WeightSyncError, match=r"lm_head\.weight|embed_tokens\.weight"):
                sync(model, Skipping(engine), step)
        else:
            assert sync(model, engine, step).matches
    assert engine.weights_version == CASE_19["steps"]
    report = compare_step(folder, engine, model, tmp_path, CASE_19["steps"])
    if not has_fault:
        assert report["verdict"] in ("equal", "rounding")
        assert report["coverage"]["modules_unmatched"] == []
        return
    assert report["verdict"] == "diverged"
    assert report["first_divergence"]["stage"] == "weights"
    assert report["causes"][0]["cause"].startswith("weights.")


def test_a_skipped_parameter_ends_the_run_at_the_sync_and_is_named(served):
    folder, engine = served
    model = reload(folder)
    disturb(model, seed=9)
    sync(model, engine, 1)
    disturb(model, seed=10)
    name = "model.layers.1.mlp.up_proj.weight"
    old = reload(folder).state_dict()[name]

    class SkipsOne(Skipping):
        def load_weights(self, named_tensors, *, version):
            sent = [(key, old if key == name else value) for key, value in named_tensors]
            self.engine.load_weights(sent, version=version)

    with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
        sync(model, SkipsOne(engine), 2)
