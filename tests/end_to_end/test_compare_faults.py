"""A planted fault is found: stage, module, tokens, pass, and the cheap causes."""

import copy
from pathlib import Path

import pytest
import torch
from compare_models import PROMPTS, compare_step, generate, make, train

import trainfer


def rows_of(sequences, *, start: int = 0):
    """Every row that generation ran: the last sampled token has none."""
    return {(i, p) for i, record in enumerate(sequences) for p in range(start, len(record.tokens) - 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "module"),
    [("qwen3", "model.layers.1.mlp.down_proj"), ("gpt2", "transformer.h.1.mlp.c_proj")],
)
def test_a_changed_weight_is_named_with_its_module_and_tokens(
    tmp_path: Path, architecture: str, module: str, dtype: torch.dtype
):
    model = make(architecture, dtype)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(module).weight[0, 0] *= 1.5
    result = compare_step(model, other, tmp_path, layout="packed")
    first = result.first_divergence
    assert (result.verdict, result.exit_code) == ("diverged", 1)
    assert (first.stage, first.module) == ("weights", module)
    assert first.tokens
    assert set(first.tokens) <= rows_of(result.comparison.rollout_sequences)
    assert result.causes[0].cause.startswith("weights.")
    assert result.causes[0].module == module
    assert result.comparison.stage("modules").status.value == "not_checked", (
        "numbers behind a weight prove nothing"
    )


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_rotary_table_in_bf16_is_the_rotary_module_from_position_one_on(tmp_path: Path, architecture: str):
    model = make(architecture)
    other = copy.deepcopy(model)
    other.model.rotary_emb.register_forward_hook(
        lambda m, a, out: tuple(t.bfloat16().to(t.dtype) for t in out)
    )
    result = compare_step(model, other, tmp_path)
    first = result.first_divergence
    assert (first.stage, first.module) == ("modules", "model.rotary_emb")
    assert set(first.tokens) == rows_of(result.comparison.rollout_sequences, start=1), (
        "cos 0 = 1 and sin 0 = 0 are exact"
    )


def test_a_rounded_rotary_buffer_is_found_among_the_weights(tmp_path: Path):
    model = make("qwen3")
    other = copy.deepcopy(model)
    other.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()
    result = compare_step(model, other, tmp_path)
    assert (result.first_divergence.stage, result.first_divergence.module) == ("weights", "model.rotary_emb")
    assert result.causes[0].cause == "weights.buffer"


@pytest.mark.parametrize(
    ("architecture", "module"), [("qwen3", "model.layers.0.self_attn"), ("gpt2", "transformer.h.0.attn")]
)
def test_a_mask_that_leaks_across_packed_sequences_spares_the_first_one(
    tmp_path: Path, architecture: str, module: str
):
    model = make(architecture)
    result = compare_step(model, model, tmp_path, layout="packed", leak=True)
    first = result.first_divergence
    assert (first.stage, first.module) == ("modules", module)
    assert set(first.tokens) == {
        token for token in rows_of(result.comparison.rollout_sequences) if token[0] > 0
    }


@pytest.mark.parametrize(
    ("architecture", "module"), [("qwen3", "model.rotary_emb"), ("gpt2", "transformer.wpe")]
)
def test_positions_that_count_padding_are_found_on_padded_rows_only(
    tmp_path: Path, architecture: str, module: str
):
    model = make(architecture)
    result = compare_step(model, model, tmp_path, layout="left", positions="arange")
    first = result.first_divergence
    assert (first.stage, first.module) == ("modules", module)
    sequences = result.comparison.rollout_sequences
    longest = max(len(record.tokens) for record in sequences)
    padded = {index for index, record in enumerate(sequences) if len(record.tokens) < longest}
    assert {sequence for sequence, _ in first.tokens} == padded


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("model.layers.1.input_layernorm", lambda m, a, out: out * 1.001),
        ("model.layers.0.mlp.act_fn", lambda m, a, out: out * 1.001),
        ("lm_head", lambda m, a, out: out.bfloat16().to(out.dtype)),
        ("model.embed_tokens", lambda m, a, out: out * 1.0001),
    ],
)
def test_what_a_module_introduces_is_told_from_what_the_next_ones_inherit(
    tmp_path: Path, module: str, change
):
    model = make("qwen3")
    other = copy.deepcopy(model)
    other.get_submodule(module).register_forward_hook(change)
    result = compare_step(model, other, tmp_path)
    assert (result.first_divergence.stage, result.first_divergence.module) == ("modules", module)
    found = {m.module: m for m in result.comparison.modules}
    assert found[module].introduced > 10 * found[module].inherited


def test_one_faulty_sequence_is_the_only_one_named(tmp_path: Path):
    model = make("llama")
    other = copy.deepcopy(model)

    def only_third(module, args, output):
        return torch.cat([output[:2], output[2:3] * 1.01, output[3:]])

    other.model.layers[1].mlp.register_forward_hook(only_third)
    result = compare_step(model, other, tmp_path, layout="right")
    assert result.first_divergence.module == "model.layers.1.mlp"
    assert {sequence for sequence, _ in result.first_divergence.tokens} == {2}
    assert len(result.first_divergence.tokens) == len(result.comparison.rollout_sequences[2].tokens) - 1


def test_decode_rows_are_called_decode(tmp_path: Path):
    model = make("qwen3")
    faulty = copy.deepcopy(model)
    faulty.model.layers[1].mlp.register_forward_hook(
        lambda m, a, out: out * 1.02 if out.shape[1] == 1 else out
    )
    sequences, lengths = generate(faulty, tmp_path / "rollout")
    train(model, tmp_path / "train", sequences, lengths)
    first = trainfer.compare(tmp_path / "rollout", tmp_path / "train").first_divergence
    assert (first.module, first.pass_name) == ("model.layers.1.mlp", "decode")
    assert all(position >= lengths[sequence] for sequence, position in first.tokens)


@pytest.mark.parametrize("declared", [1.0, 0.5])
def test_raw_log_probs_beside_scaled_ones_are_the_temperature(tmp_path: Path, declared: float):
    """Case 17: modules and logits agree, the log-probs do not; reading both alike removes the difference."""
    model = make("qwen3")
    sequences, lengths = generate(model, tmp_path / "rollout", temperature=0.5, recorded="raw")
    train(model, tmp_path / "train", sequences, lengths, temperature=0.5, declared=declared)
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert (result.first_divergence.stage, result.first_divergence.module) == ("logprobs", None)
    assert [cause.cause for cause in result.causes] == ["logprob.temperature"]
    assert result.causes[0].confirmed
    assert result.causes[0].share_explained > 0.99


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_processed_log_probs_are_silent(tmp_path: Path, temperature: float):
    """Case 17, controls."""
    model = make("qwen3")
    sequences, lengths = generate(model, tmp_path / "rollout", temperature=temperature)
    train(model, tmp_path / "train", sequences, lengths, temperature=temperature)
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert result.verdict in ("equal", "rounding")
    assert not result.causes


def test_another_policy_is_staleness_and_no_mismatch(tmp_path: Path):
    """N12: one real optimizer step lies between the two sides."""
    model = make("qwen3")
    sequences, lengths = generate(model, tmp_path / "rollout")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    train(model, tmp_path / "train", sequences, lengths, weights_version=1)
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert [cause.cause for cause in result.causes] == ["policy.staleness"]
    assert result.comparison.coverage.rows_matched == 0
    assert result.comparison.stage("modules").status.value == "not_checked"


def test_weights_of_an_earlier_version_are_stale(tmp_path: Path):
    model = make("qwen3")
    rollout_model = copy.deepcopy(model)
    sequences = [[5, 6, 7, 8, 9, 1, 2]]
    with (
        torch.no_grad(),
        trainfer.capture(rollout_model, tmp_path / "rollout", side="rollout", weights_version=1),
    ):
        rollout_model(input_ids=torch.tensor(sequences), use_cache=False)
    with torch.no_grad(), trainfer.capture(model, tmp_path / "train", side="train", weights_version=0) as cap:
        model(input_ids=torch.tensor(sequences), use_cache=False)
        for parameter in model.parameters():
            parameter.mul_(1.01)
        cap.step(weights_version=1)
        model(input_ids=torch.tensor(sequences), use_cache=False)
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert (result.first_divergence.stage, result.first_divergence.module) == (
        "weights",
        "model.embed_tokens",
    )
    assert result.causes[0].cause == "weights.stale"
    assert any("train version 0" in line for line in result.causes[0].evidence)


def test_prompts_have_the_lengths_that_the_tests_rely_on():
    assert [len(prompt) for prompt in PROMPTS] == [5, 5, 3, 9]
