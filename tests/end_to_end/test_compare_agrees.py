"""Equal policies are called equal: no false alarm, every row matched, whatever the shapes."""

from pathlib import Path

import pytest
import torch
from compare_models import ARCHITECTURES, PROMPTS, compare_step, forward, generate, make, train
from fused_engine import FusedEngine

import trainfer


def assert_agrees(result) -> None:
    assert result.verdict in ("equal", "rounding"), result.summary()
    assert result.first_divergence is None
    assert result.exit_code == 0
    assert all(cause.cause.startswith("shape.") for cause in result.causes)
    coverage = result.comparison.coverage
    assert coverage.rows_matched == coverage.rows_rollout > 0
    assert not coverage.incomplete


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cached_generation_agrees_with_a_packed_training_forward(
    tmp_path: Path, architecture: str, dtype: torch.dtype
):
    model = make(architecture, dtype)
    assert_agrees(compare_step(model, model, tmp_path, layout="packed"))


@pytest.mark.parametrize("layout", ["right", "left"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma3"])
def test_cached_generation_agrees_with_a_padded_training_forward(
    tmp_path: Path, architecture: str, layout: str
):
    model = make(architecture)
    result = compare_step(model, model, tmp_path, layout=layout)
    assert_agrees(result)
    assert not result.comparison.coverage.modules_unmatched
    assert result.comparison.stage("batch_shape").status.value == "equal"


def test_another_attention_kernel_is_rounding(tmp_path: Path):
    result = compare_step(make("qwen2"), make("qwen2", attention="sdpa"), tmp_path, layout="right")
    assert_agrees(result)
    assert result.verdict == "rounding"


def test_micro_batches_in_another_order_and_a_second_pass_change_nothing(tmp_path: Path):
    """N10: gradient accumulation splits; N8: the same rows computed again; sequences recorded in another order."""
    model = make("qwen3")
    result = compare_step(model, model, tmp_path, layout="packed", micro=2, order=[3, 1, 0, 2], passes=2)
    assert_agrees(result)
    assert result.comparison.stage("batch_shape").status.value in ("equal", "rounding")


def test_a_group_with_equal_prompts_and_equal_responses_is_joined(tmp_path: Path):
    """N7: duplicates within a group share keys."""
    model = make("qwen3")
    sequences = [[5, 6, 7, 8, 9, 1, 2], [5, 6, 7, 8, 9, 1, 2], [5, 6, 7, 8, 9, 1, 3]]
    for side, layout in (("rollout", "left"), ("train", "packed")):
        with torch.no_grad(), trainfer.capture(model, tmp_path / side, side=side, pass_name="forward") as cap:
            parts = forward(model, sequences, layout)
            values = [
                [torch.log_softmax(logits, -1)[p - 1, ids[p]].item() for p in (5, 6)]
                for ids, logits in zip(sequences, parts, strict=True)
            ]
            cap.record_logprobs(sequences=sequences, prompt_lengths=[5] * 3, logprobs=values, sampling={})
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert_agrees(result)
    assert result.comparison.stage("batch_shape").status.value in ("equal", "rounding")


def test_warm_up_calls_are_counted_and_not_compared(tmp_path: Path):
    """N3 and N6: passes that no sequence was recorded for; a last token that one side never runs."""
    model = make("qwen3")
    sequences = [[5, 6, 7, 8, 9, 30, 31], [10, 11, 12, 40, 41]]
    with (
        torch.no_grad(),
        trainfer.capture(model, tmp_path / "rollout", side="rollout", pass_name="prefill") as cap,
    ):
        model(input_ids=torch.full((2, 16), 3), use_cache=False)
        parts = forward(model, sequences, "packed")
        values = [
            [torch.log_softmax(logits, -1)[p - 1, ids[p]].item() for p in range(3, len(ids))]
            for ids, logits in zip(sequences, parts, strict=True)
        ]
        cap.record_logprobs(sequences=sequences, prompt_lengths=[3, 3], logprobs=values, sampling={})
    train(model, tmp_path / "train", sequences, [3, 3], layout="right")
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert result.verdict in ("equal", "rounding"), result.summary()
    assert result.comparison.coverage.rows_matched == 12
    assert any("warm-up" in note for note in result.comparison.coverage.notes)


def test_tokens_after_the_end_and_terminal_padding_are_left_out(tmp_path: Path):
    """N11: generate runs finished sequences on; those rows have no partner and raise no alarm."""
    model = make("qwen3", seed=3)
    with torch.no_grad():
        model.lm_head.weight[63] += 0.2
    sequences, lengths = generate(model, tmp_path / "rollout", new=24)
    assert len({len(s) - n for s, n in zip(sequences, lengths, strict=True)}) > 1, (
        "some sequence must end early"
    )
    train(model, tmp_path / "train", sequences, lengths, layout="right")
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert_agrees(result)
    assert result.comparison.coverage.not_rows["rollout discarded"] > 0


SEQUENCES = [[5, 6, 7, 8, 9, 11, 12], [5, 6, 7, 8, 9, 30], [10, 11, 12, 40, 41, 42, 43]]


def fused_pair(folder: Path, engine: FusedEngine, model):
    flat = [token for sequence in SEQUENCES for token in sequence]
    rows = trainfer.Rows(token_ids=flat, sequence_lengths=[len(s) for s in SEQUENCES])
    options = {"side": "rollout", "pass_name": "prefill", "rows": rows, "weights": "full"}
    with torch.no_grad(), trainfer.capture(engine, folder / "rollout", **options):
        engine.run(SEQUENCES)
    with (
        torch.no_grad(),
        trainfer.capture(model, folder / "train", side="train", pass_name="old_log_prob", weights="full"),
    ):
        forward(model, SEQUENCES, "packed")
    return trainfer.compare(folder / "rollout", folder / "train")


@pytest.mark.parametrize("grouped", [False, True])
def test_a_fused_engine_agrees_with_the_model_it_was_made_from(tmp_path: Path, grouped: bool):
    """N1: residual in two parts; N2: fused projections, also with interleaved groups; N5: keys before and after RoPE."""
    model = make("qwen2")
    result = fused_pair(tmp_path, FusedEngine(model, grouped=grouped), model)
    assert_agrees(result)
    how = result.comparison.coverage.how_matched
    assert how["fused"] == 12
    assert how["residual"] == 2
    assert how["rotary"] == 1
    assert result.comparison.stage("weights").status.value == "equal"
    layouts = [
        note for module in result.comparison.modules for note in module.notes if "another order" in note
    ]
    assert bool(layouts) == grouped, "interleaved groups are found by value, and said"


def scaled(factor: float):
    return lambda module, args, output: output * factor


@pytest.mark.parametrize(
    ("plant", "module"),
    [
        (
            lambda e: e.model.layers[1].mlp.act_fn.register_forward_hook(scaled(1.01)),
            "model.layers.1.mlp.act_fn",
        ),
        (lambda e: e.model.layers[0].self_attn.rotary_emb.inv_freq.mul_(1.05), "model.rotary_emb"),
        (
            lambda e: e.model.layers[1].post_attention_layernorm.__dict__.update(eps=0.01),
            "model.layers.1.post_attention_layernorm",
        ),
        (
            lambda e: e.model.layers[0].self_attn.attn.register_forward_hook(scaled(1.02)),
            "model.layers.0.self_attn",
        ),
    ],
)
def test_a_fault_in_a_fused_engine_carries_the_transformers_name(tmp_path: Path, plant, module: str):
    model = make("qwen2")
    engine = FusedEngine(model)
    plant(engine)
    result = fused_pair(tmp_path, engine, model)
    assert result.verdict == "diverged"
    assert result.first_divergence.module == module


def test_prompts_are_what_the_group_says():
    assert PROMPTS[0] == PROMPTS[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["right", "left"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma2", "mixtral"])
def test_padding_raises_no_alarm_in_either_precision(
    tmp_path: Path, architecture: str, layout: str, dtype: torch.dtype
):
    """N9: padding rows on one side or the other are no rows; tokens whose neighbours are padding agree."""
    model = make(architecture, dtype)
    sequences, lengths = generate(model, tmp_path / "rollout", new=6)
    train(model, tmp_path / "train", sequences, lengths, layout=layout)
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert_agrees(result)
    coverage = result.comparison.coverage
    apart = [line for line in coverage.modules_unmatched if ".experts.act_fn" not in line]
    assert not apart, "an expert sees the rows that were sent to it, and those alone cannot be told"
    assert coverage.not_rows["rollout padding"] > 0
    assert coverage.not_rows["train padding"] > 0
