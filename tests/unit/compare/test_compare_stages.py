"""The stages on dumps written by hand: odd values, damage, shapes, shards, versions."""

import json
import math
from pathlib import Path

import pytest
import torch
from dump_by_hand import SideContent, Written

import trainfer
from trainfer.check.dump.records import Role
from trainfer.errors import DumpError

SEQUENCES = [[1, 2, 3], [4, 5]]
X = torch.arange(40.0).reshape(5, 8) + 1


def compare(write_side, rollout: SideContent, train: SideContent):
    return trainfer.compare(write_side("rollout", rollout), write_side("train", train))


def side(*tensors: Written, **more) -> SideContent:
    return SideContent(sequences=SEQUENCES, tensors=tensors, **more)


def test_equal_dumps_are_equal(write_side):
    content = side(Written("model.norm", X), weights={"model.norm.weight": torch.ones(8)})
    result = compare(write_side, content, content)
    assert (result.verdict, result.exit_code, result.causes) == ("equal", 0, ())
    assert result.comparison.coverage.rows_matched == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_beside_nan_is_never_a_pass(write_side, dtype: torch.dtype):
    """Case 38."""
    odd = X.to(dtype).clone()
    odd[1, 2] = math.nan
    result = compare(write_side, side(Written("model.norm", odd)), side(Written("model.norm", odd)))
    module = result.comparison.modules[0]
    assert result.verdict == "diverged"
    assert module.metrics.nan_both == 1
    assert any("NaN on both sides" in note for note in module.notes)
    assert result.first_divergence.tokens == ((0, 1),)


def test_nan_on_one_side_names_its_row(write_side):
    odd = X.clone()
    odd[3, 0] = math.nan
    result = compare(write_side, side(Written("model.norm", X)), side(Written("model.norm", odd)))
    assert result.first_divergence.tokens == ((1, 0),)
    assert result.comparison.modules[0].metrics.nan_train == 1


def test_equal_infinities_are_equal(write_side):
    masked = X.clone()
    masked[:, 0] = -math.inf
    content = side(Written("lm_head", masked))
    assert compare(write_side, content, content).verdict == "equal"


def test_odd_tensors_do_not_disturb_and_the_document_is_strict_json(write_side, tmp_path: Path):
    """Case 38: bf16, NaN, Inf, empty, whole numbers, booleans, zero dimensions."""
    tensors = [
        Written("a.bf16", torch.tensor([1.0, -2.5, 0.15625], dtype=torch.bfloat16), rows=False),
        Written("a.nan", torch.tensor([math.nan, 1.0, math.inf, -3.0]), rows=False),
        Written("a.empty", torch.empty(0), rows=False),
        Written("a.int", torch.tensor([3, -7]), rows=False),
        Written("a.bool", torch.tensor([True, False]), rows=False),
        Written("a.zero_dim", torch.tensor(2.0), rows=False),
    ]
    result = compare(write_side, side(*tensors), side(*tensors))
    statuses = {module.module: module.status.value for module in result.comparison.modules}
    assert statuses.pop("a.nan") == "diverged"
    assert set(statuses.values()) == {"equal"}
    out = result.write(tmp_path / "out")

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    document = json.loads((out / "result.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert document["verdict"] == "diverged"


def test_unequal_widths_are_a_finding(write_side):
    result = compare(write_side, side(Written("lm_head", X)), side(Written("lm_head", X[:, :6])))
    assert result.verdict == "diverged"
    assert any("8 features in the rollout and 6" in note for note in result.comparison.modules[0].notes)


def test_unequal_shapes_without_rows_are_a_finding(write_side):
    first, second = Written("a", torch.ones(3, 4), rows=False), Written("a", torch.ones(3, 5), rows=False)
    result = compare(write_side, side(first), side(second))
    assert result.verdict == "diverged"


def test_a_damaged_record_is_unreadable_and_no_pass(write_side):
    rollout = write_side("rollout", side(Written("model.norm", X), Written("lm_head", X * 2)))
    train = write_side("train", side(Written("model.norm", X), Written("lm_head", X * 2)))
    shard = next(train.rglob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = trainfer.compare(rollout, train)
    statuses = {module.module: module.status.value for module in result.comparison.modules}
    assert statuses == {"model.norm": "equal", "lm_head": "unreadable"}
    assert (result.verdict, result.exit_code) == ("incomparable", 2)
    assert any("checksum" in text for text in result.comparison.coverage.incomplete)


def test_a_capture_that_was_never_closed_is_no_pass(write_side):
    whole = side(Written("model.norm", X))
    cut = side(Written("model.norm", X), finished=False)
    result = compare(write_side, whole, cut)
    assert result.verdict == "incomparable"
    assert result.comparison.modules[0].status.value == "equal"
    assert "never closed" in result.explanation.why


def test_nothing_in_common_is_incomparable_and_says_why(write_side):
    first, second = side(Written("model.norm", X)), side(Written("other.norm", X))
    result = compare(write_side, first, second)
    assert (result.verdict, result.exit_code) == ("incomparable", 2)
    assert set(result.comparison.coverage.modules_unmatched) == {
        "model.norm (only in rollout)",
        "other.norm (only in train)",
    }


def test_other_tokens_share_no_rows(write_side):
    first = side(Written("model.norm", X))
    second = SideContent(sequences=[[9, 9, 9], [8, 8]], tensors=[Written("model.norm", X + 5)])
    result = compare(write_side, first, second)
    assert (result.first_divergence.stage, result.first_divergence.module) == ("tokens", None)
    assert result.comparison.stage("modules").status.value == "not_checked"


def test_rows_before_the_first_unlike_token_are_still_compared(write_side):
    first = SideContent(sequences=[[1, 2, 3, 4]], tensors=[Written("model.norm", X[:4])])
    second = SideContent(sequences=[[1, 2, 9, 4]], tensors=[Written("model.norm", X[:4])])
    result = compare(write_side, first, second)
    assert result.comparison.coverage.rows_matched == 2
    assert result.comparison.stage("modules").status.value == "equal"
    assert result.first_divergence.tokens == ((0, 2),)


def test_the_engine_retokenises(write_side):
    """Case 23, first: no module is named, the index is."""
    engine = [5, 21, 22, 7, 90, 91, 92, 93, 7, 40, 41, 42]
    rescored = [5, 21, 22, 7, 90, 91, 92, 8, 93, 7, 40, 41, 42]
    result = compare(
        write_side,
        SideContent(
            sequences=[engine], tensors=[Written("model.norm", torch.ones(12, 4))], prompt_lengths=[4]
        ),
        SideContent(
            sequences=[rescored], tensors=[Written("model.norm", torch.ones(13, 4) * 3)], prompt_lengths=[4]
        ),
    )
    first = result.first_divergence
    assert (first.stage, first.module, first.tokens, first.pass_name) == ("tokens", None, ((0, 7),), "decode")
    assert result.causes[0].cause.startswith("tokens.")
    assert "index 7" in result.causes[0].evidence[0]
    assert "[8] before 93" in result.causes[0].evidence[0]


def test_the_template_drops_earlier_thinking(write_side):
    """Case 23, second."""
    turn, prefix = [3, 10, 11, 4, 60, 61, 62, 61, 30, 31, 2], [3, 10, 11, 4, 30, 31, 2]
    result = compare(write_side, SideContent(sequences=[turn]), SideContent(sequences=[prefix]))
    assert result.causes[0].cause == "tokens.template"
    assert result.first_divergence.tokens == ((0, 4), (0, 5), (0, 6), (0, 7))
    assert "indices 4 to 7" in result.causes[0].evidence[0]


def test_a_side_is_checked_against_what_it_ran(write_side):
    """Recorded ids with a token that was never run: both sides record alike, one runs something else."""
    honest = SideContent(sequences=[[1, 2, 3, 4, 5]])
    lying = SideContent(sequences=[[1, 2, 3, 4, 5]], executed=[[7, 1, 2, 3, 4, 5]])
    result = compare(write_side, honest, lying)
    finding = result.comparison.tokens[0]
    assert (finding.kind, finding.sequence) == ("train", 0)
    assert result.first_divergence.stage == "tokens"
    assert result.causes[0].cause == "tokens.inserted"


def test_responses_joined_to_the_wrong_prompt(write_side):
    right = SideContent(sequences=[[1, 2, 7, 8], [3, 4, 5, 6]], prompt_lengths=[2, 2])
    wrong = SideContent(sequences=[[3, 4, 7, 8], [1, 2, 5, 6]], prompt_lengths=[2, 2])
    assert compare(write_side, right, wrong).causes[0].cause == "tokens.wrong_sample"


def test_weights_that_differ_hide_no_module_before_them(write_side):
    weights = {"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(8)}
    changed = weights | {"lm_head.weight": torch.full((8,), 2.0)}
    first = side(Written("model.norm", X), Written("lm_head", X), weights=weights)
    second = side(Written("model.norm", X), Written("lm_head", 2 * X), weights=changed)
    result = compare(write_side, first, second)
    assert (result.first_divergence.stage, result.first_divergence.module) == ("weights", "lm_head")
    assert result.first_divergence.tokens == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    assert result.causes[0].cause == "weights.changed"


def test_a_missing_parameter_is_named(write_side):
    weights = {"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(8)}
    first = side(weights={"model.norm.weight": torch.ones(8)})
    result = compare(write_side, first, side(weights=weights))
    assert (result.causes[0].cause, result.causes[0].module) == ("weights.missing", "lm_head")


def test_tensor_parallel_shards_are_gathered(tmp_path: Path):
    from dump_by_hand import write

    for rank in range(2):
        part = Written("model.layers.0.mlp.up_proj", X[:, 4 * rank : 4 * rank + 4].contiguous())
        same = Written("model.layers.0.mlp.down_proj", X * 2)
        write(tmp_path / "rollout", side(part, same, rank=rank, world_size=2, side="rollout"))
    write(
        tmp_path / "train",
        side(Written("model.layers.0.mlp.up_proj", X), Written("model.layers.0.mlp.down_proj", X * 2)),
    )
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert result.verdict == "equal", result.summary()
    assert result.comparison.coverage.how_matched == {"shards": 1, "name": 1}


def test_inputs_that_differ_are_inherited_and_not_introduced(write_side):
    def chain(first: torch.Tensor, second: torch.Tensor) -> SideContent:
        return side(
            Written("a", X, role=Role.INPUT),
            Written("a", first),
            Written("b", first, role=Role.INPUT),
            Written("b", second),
        )

    result = compare(write_side, chain(X, 2 * X), chain(X * 1.01, 2 * X * 1.01))
    assert result.first_divergence.module == "a"
    introduced = {module.module: module.introduced for module in result.comparison.modules}
    assert introduced["a"] > 0.009
    assert introduced["b"] == 0


def test_log_probs_without_logits(write_side):
    """One constant ratio of all log-probs is a division after the softmax."""
    values = [[-0.5, -1.25, -2.0, -0.75, -3.0]]
    first = SideContent(sequences=[[1, 2, 3, 4, 5, 6]], logprobs=values)
    second = SideContent(sequences=[[1, 2, 3, 4, 5, 6]], logprobs=[[v / 0.5 for v in values[0]]])
    result = compare(write_side, first, second)
    assert (result.first_divergence.stage, result.verdict) == ("logprobs", "diverged")
    assert result.causes[0].cause == "logprob.scaled_after_softmax"
    assert result.causes[0].share_explained == pytest.approx(1.0)


def test_a_log_prob_that_is_not_finite_is_a_finding(write_side):
    first = SideContent(sequences=[[1, 2, 3]], logprobs=[[-0.5, -1.0]])
    second = SideContent(sequences=[[1, 2, 3]], logprobs=[[-0.5, "-inf"]])
    result = compare(write_side, first, second)
    assert result.verdict == "diverged"
    assert result.first_divergence.tokens == ((0, 2),)


def test_what_is_no_dump_is_refused(tmp_path: Path):
    with pytest.raises(DumpError, match="no folder"):
        trainfer.compare(tmp_path / "missing", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="holds no dump"):
        trainfer.compare(tmp_path / "empty", tmp_path / "empty")
