"""The callback for TRL, without TRL: a loop that calls model and callback in GRPOTrainer's order.

``tests/trl`` runs the real trainer.
"""

import functools
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import ModelOutput

from trainfer.check.dump.reader import Dump
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError
from trainfer.integrations.trl.callback import CaptureCallback

PROMPTS = torch.tensor([[0, 0, 7, 8, 9], [11, 12, 13, 14, 15]])
MASK = (PROMPTS != 0).long()
END = 1


def tiny():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=0, eos_token_id=END, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def scores_like_trl(model, temperature):
    """As TRL does: with labels, the forward gives log-probs of labelled tokens and never calls the head."""
    plain = model.forward

    @functools.wraps(type(model).forward)  # generate reads its signature
    def forward(self, *args, labels=None, **kwargs):
        if labels is None:
            return plain(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state[:, :-1]
        table = (hidden @ self.lm_head.weight.T / temperature).log_softmax(-1)
        chosen = table.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return ModelOutput(log_probs=chosen.masked_fill(labels[:, 1:] == -100, 0))

    model.forward = types.MethodType(forward, model)


def adapted():
    model = get_peft_model(
        tiny(), LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


class Loop:
    """What GRPOTrainer does, in its order."""

    def __init__(self, callback, *, model=None, first_step=0, **changes):
        given = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": None, "beta": 0.0, "use_vllm": False}
        self.args = SimpleNamespace(**{**given, "process_index": 0, "world_size": 1, **changes})
        self.model = tiny() if model is None else model
        self.callback = callback
        self.state = SimpleNamespace(global_step=0)
        policy = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        scores_like_trl(policy, self.args.temperature)
        self.drawn = None
        self.state.global_step = first_step
        self.call("on_train_begin")

    def call(self, event):
        if self.callback is not None:
            getattr(self.callback, event)(self.args, self.state, None, model=self.model)

    def generate(self):
        config = GenerationConfig(
            max_new_tokens=6, do_sample=True, temperature=self.args.temperature, top_k=self.args.top_k,
            top_p=self.args.top_p, pad_token_id=0, eos_token_id=END,
        )  # fmt: skip
        with torch.no_grad():
            self.drawn = self.model.generate(input_ids=PROMPTS, attention_mask=MASK, generation_config=config)

    def score(self, *, grad=True):
        width = PROMPTS.shape[1]
        answers = self.drawn[:, width:]
        before_end = (answers == END).cumsum(1) - (answers == END).long() == 0
        mask = torch.cat([MASK, before_end.long()], 1)
        labels = self.drawn.masked_fill(mask == 0, -100)
        labels[:, :width] = -100
        positions = (mask.cumsum(-1) - 1).clamp(0)
        with torch.set_grad_enabled(grad):
            return self.model(
                input_ids=self.drawn, attention_mask=mask, position_ids=positions, labels=labels
            ).log_probs

    def step(self, *, phases=("generate", "score")):
        self.call("on_step_begin")
        for phase in phases:
            if phase == "generate":
                self.generate()
            else:
                self.score(grad=phase == "score").sum().backward() if phase == "score" else self.score(
                    grad=False
                )
        self.call("on_pre_optimizer_step")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.01 * (parameter.grad if parameter.grad is not None else 0))
        self.model.zero_grad()
        self.state.global_step += 1
        self.call("on_step_end")


def sequences(folder: Path):
    return list(Dump(folder).sequences(0))


def test_a_step_gives_two_sides_that_agree_row_by_row(tmp_path):
    lines = []
    callback = CaptureCallback(tmp_path / "dumps", steps=[1], tell=lines.append)
    loop = Loop(callback)
    loop.step()
    assert not (tmp_path / "dumps").exists()
    loop.step()
    result = callback.results[1]
    assert result.verdict in ("equal", "rounding")
    coverage = result.comparison.coverage
    assert coverage.rows_matched == coverage.rows_rollout > 8 + 2 * 4
    assert result.document().logprobs.count == sum(
        len(r.logprobs) for r in sequences(tmp_path / "dumps/step_1/train")
    )
    assert result.document().logprobs.abs_diff_max < 1e-5
    assert {r.weights_version for r in sequences(tmp_path / "dumps/step_1/rollout")} == {1}
    assert lines == [f"trainfer step 1: {result.verdict} ({coverage.rows_matched} rows matched of "
                     f"{coverage.rows_rollout}): {tmp_path}/dumps/step_1/report/report.html"]  # fmt: skip
    assert (tmp_path / "dumps/step_1/report/result.json").is_file()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6)])
def test_recorded_logprobs_are_those_of_the_distribution_that_was_sampled(tmp_path, top_k, top_p):
    callback = CaptureCallback(tmp_path, compare_steps=False, tell=lambda _: None)
    loop = Loop(callback, top_k=top_k, top_p=top_p)
    loop.step()
    records = sequences(tmp_path / "step_0/rollout")
    fresh = tiny()
    for record in records:
        ids = torch.tensor([record.tokens])
        with torch.no_grad():
            logits = fresh(input_ids=ids).logits[0, record.prompt_length - 1 : -1] / 0.7
        kept = torch.ones_like(logits, dtype=torch.bool)
        if top_k:
            kept = logits >= logits.topk(top_k).values[:, -1:]
        if top_p < 1:
            ordered, places = logits.softmax(-1).sort(descending=True)
            kept = torch.zeros_like(kept).scatter(1, places, ordered.cumsum(-1) - ordered < top_p)
        expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
        chosen = expected.gather(-1, ids[0, record.prompt_length :, None])[:, 0]
        assert list(record.logprobs) == pytest.approx(chosen.tolist(), abs=1e-5)
        assert record.sampling == {"temperature": 0.7, "top_k": top_k or -1, "top_p": top_p, "min_p": 0.0}
    assert [record.prompt_length for record in records] == [3, 5]
    assert {r.pass_name for r in sequences(tmp_path / "step_0/train")} == {"update"}


def test_a_filter_that_scoring_leaves_out_is_found(tmp_path):
    callback = CaptureCallback(tmp_path, tell=lambda _: None)
    Loop(callback, top_k=5).step()
    assert callback.results[0].verdict == "diverged"
    assert [cause.cause for cause in callback.results[0].causes] == ["logprob.filtered"]


def test_generating_and_scoring_by_turns_in_one_step(tmp_path):
    callback = CaptureCallback(tmp_path, tell=lambda _: None)
    Loop(callback).step(phases=["generate", "old", "score", "generate", "score"])
    result = callback.results[0]
    assert result.verdict in ("equal", "rounding")
    assert len(sequences(tmp_path / "step_0/rollout")) == 4
    assert [r.pass_name for r in sequences(tmp_path / "step_0/train")] == ["old_log_prob"] * 2 + [
        "update"
    ] * 4
    coverage = result.comparison.coverage
    assert coverage.rows_matched == coverage.rows_rollout


def test_a_step_that_generates_nothing_says_so(tmp_path):
    lines = []
    callback = CaptureCallback(tmp_path, steps=[1], tell=lines.append)
    loop = Loop(callback)
    loop.step()
    loop.step(phases=["score"])
    assert "scored completions of an earlier step" in lines[0]
    assert sequences(tmp_path / "step_1/train")
    assert not (tmp_path / "step_1/rollout").exists()


def test_weights_and_tokens_are_bitwise_those_of_a_run_without_it_and_nothing_stays_behind(tmp_path):
    runs = []
    for callback in (None, CaptureCallback(tmp_path, steps=[0, 1], tell=lambda _: None)):
        torch.manual_seed(3)
        loop = Loop(callback, model=tiny())
        torch.manual_seed(4)
        drawn = []
        for _ in range(2):
            loop.step()
            drawn.append(loop.drawn)
        runs.append((loop.model, drawn))
    (plain, drawn), (watched, same) = runs
    assert all(torch.equal(a, b) for a, b in zip(drawn, same, strict=True))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "generate" not in vars(watched)
    assert "_get_logits_processor" not in vars(watched)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in watched.modules()) == 0


def test_a_fault_on_the_training_side_is_named(tmp_path):
    callback = CaptureCallback(tmp_path, tell=lambda _: None)
    loop = Loop(callback)
    loop.call("on_step_begin")
    loop.generate()
    loop.model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    loop.score()
    loop.call("on_pre_optimizer_step")
    result = callback.results[0]
    assert result.verdict == "diverged"
    assert result.first_divergence.module == "model.layers.1.input_layernorm"


def test_a_model_with_an_adapter(tmp_path):
    callback = CaptureCallback(tmp_path, tell=lambda _: None)
    loop = Loop(callback, model=adapted())
    loop.step()
    result = callback.results[0]
    assert result.verdict in ("equal", "rounding")
    assert result.comparison.coverage.rows_matched == result.comparison.coverage.rows_rollout
    assert "generate" not in vars(loop.model)


def test_a_run_that_resumes_behind_its_captured_steps_goes_on(tmp_path):
    (tmp_path / "step_0").mkdir()
    Loop(CaptureCallback(tmp_path, steps=[0, 4]), first_step=1)


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "step_2").mkdir()
    with pytest.raises(CaptureError, match="step_2 is there already"):
        Loop(CaptureCallback(tmp_path, steps=[0, 2]))
    with pytest.raises(CaptureError, match="cannot be told from the policy's"):
        Loop(CaptureCallback(tmp_path), model=adapted(), beta=0.1)
    with pytest.raises(CaptureError, match="for TRL's GRPOTrainer"):
        CaptureCallback(tmp_path).on_train_begin(
            SimpleNamespace(beta=0.0), SimpleNamespace(global_step=0), None, model=tiny()
        )
    with pytest.raises(CaptureError, match="name optimizer steps"):
        CaptureCallback(tmp_path, steps=[])
    with pytest.raises(CaptureError, match="task='tensors'"):
        CaptureCallback(tmp_path, task="tensors")


def test_completions_of_vllm_are_not_mistaken_for_the_models(tmp_path):
    lines = []
    with pytest.warns(CaptureWarning, match="vLLM makes the completions"):
        loop = Loop(CaptureCallback(tmp_path, tell=lines.append), use_vllm=True)
    loop.drawn = torch.cat([PROMPTS, PROMPTS], 1)
    loop.step(phases=["score"])
    assert "(vLLM)" in lines[0]
    assert sequences(tmp_path / "step_0/train")


def test_more_processes_leave_the_comparison_to_the_command(tmp_path):
    lines = []
    Loop(CaptureCallback(tmp_path, tell=lines.append), world_size=2).step()
    assert f"trainfer compare {tmp_path}/step_0/rollout {tmp_path}/step_0/train" in lines[0]
