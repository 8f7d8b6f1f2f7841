"""Our loss, KL, entropy and agreement metrics against the numbers that verl 0.9.1's own functions gave."""

import json
from pathlib import Path

import pytest
import torch

from trainfer.exact.logprobs import row_entropies
from trainfer.train.agreement import measure
from trainfer.train.update.aggregate import LossAggregation, MiniBatchTotals, token_weight
from trainfer.train.update.correction import ImportanceLevel, WeightBounds, rollout_weights
from trainfer.train.update.kl import KlEstimator, token_kl
from trainfer.train.update.loss import LossInputs, LossSettings, grpo_loss

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_core.json").read_text())
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOLERANCE = {"float32": 3e-6, "float64": 1e-9}
"""verl computes in the row's dtype and adds 1e-8 to token counts."""


def rows(name):
    return [pytest.param(row, id=row["id"]) for row in GOLDEN[name]]


def flat(row, name):
    """The kept tokens of a padded matrix, sequence after sequence."""
    mask = torch.tensor(row["mask"], dtype=torch.bool)
    return torch.tensor(row[name], dtype=torch.float64).to(DTYPES[row["dtype"]])[mask]


def ragged(row, name):
    return [
        [value for value, kept in zip(values, mask, strict=True) if kept]
        for values, mask in zip(row[name], row["mask"], strict=True)
    ]


def token_weights(row):
    lengths = [sum(mask) for mask in row["mask"]]
    totals = MiniBatchTotals(tokens=sum(lengths), sequences=len(lengths))
    mode = LossAggregation(row["agg_mode"])
    return [
        token_weight(mode, trained_tokens=length, totals=totals, horizon=len(row["mask"][0]))
        for length in lengths
        for _ in range(length)
    ]


@pytest.mark.parametrize("row", rows("policy_loss"))
def test_loss_gradient_and_metrics_equal_verls(row):
    dtype = DTYPES[row["dtype"]]
    logprobs = flat(row, "logprobs").requires_grad_()
    count = len(logprobs)
    inputs = LossInputs(
        logprobs_S=logprobs,
        old_logprobs_S=flat(row, "old_logprobs"),
        advantages_S=flat(row, "advantages"),
        mask_S=torch.ones(count, dtype=torch.bool),
        token_weights_S=torch.tensor(token_weights(row), dtype=dtype),
        entropies_S=torch.zeros(count, dtype=dtype),
        rollout_weights_S=flat(row, "rollout_weights") if row["rollout_weights"] else None,
    )
    settings = LossSettings(
        clip_ratio_low=row["clip_ratio_low"],
        clip_ratio_high=row["clip_ratio_high"],
        clip_ratio_c=row["clip_ratio_c"],
    )
    out = grpo_loss(inputs, settings)
    out.loss.backward()
    close = {"rel": TOLERANCE[row["dtype"]], "abs": TOLERANCE[row["dtype"]]}
    assert out.loss.item() == pytest.approx(row["loss"], **close)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(flat(row, "gradient").tolist(), **close)
    assert {
        "actor/pg_clipfrac": out.clipped_tokens.item() / count,
        "actor/pg_clipfrac_lower": out.clipped_lower_tokens.item() / count,
        "actor/ppo_kl": out.ppo_kl_sum.item() / count,
    } == pytest.approx(row["metrics"], **close)


@pytest.mark.parametrize("row", rows("kl_penalty"))
def test_kl_and_its_gradient_equal_verls(row):
    dtype = DTYPES[row["dtype"]]
    logprobs = torch.tensor(row["logprobs"], dtype=dtype).flatten().requires_grad_()
    ref = torch.tensor(row["ref_logprobs"], dtype=dtype).flatten()
    kind = row["kind"]
    kl = token_kl(logprobs, ref, KlEstimator.of(kind.removesuffix("+")), straight_through=kind.endswith("+"))
    kl.sum().backward()
    close = {"rel": TOLERANCE[row["dtype"]], "abs": TOLERANCE[row["dtype"]]}
    assert kl.tolist() == pytest.approx(
        torch.tensor(row["kl"], dtype=torch.float64).flatten().tolist(), **close
    )
    assert logprobs.grad is not None
    expected = torch.tensor(row["gradient_of_sum"], dtype=dtype).flatten().tolist()
    assert logprobs.grad.tolist() == pytest.approx(expected, **close)


@pytest.mark.parametrize("row", rows("entropy"))
def test_entropy_equals_verls(row):
    mask = torch.tensor(row["mask"], dtype=torch.bool)
    logits_SV = torch.tensor(row["logits"])[mask]
    weighted = row_entropies(logits_SV.log_softmax(dim=-1)) * torch.tensor(token_weights(row))
    assert weighted.sum().item() == pytest.approx(row["entropy"], rel=3e-6)


@pytest.mark.parametrize("row", rows("debug_metrics"))
def test_probability_metrics_equal_verls(row):
    result = measure(ragged(row, "old_logprobs"), ragged(row, "rollout_logprobs"))
    assert result is not None
    tolerance = 1e-6 if row["dtype"] == "float32" else 1e-9
    assert result.probabilities.metrics() == pytest.approx(row["metrics"], rel=1e-5, abs=tolerance)


@pytest.mark.parametrize("row", rows("rollout_correction"))
def test_policy_gap_metrics_equal_verls(row):
    result = measure(ragged(row, "old_logprobs"), ragged(row, "rollout_logprobs"))
    assert result is not None
    ours = result.gap.metrics()
    verls = {name: value for name, value in row["metrics"].items() if name in ours}
    assert len(verls) == 13
    assert ours == pytest.approx(verls, rel=2e-5, abs=5e-7)


@pytest.mark.parametrize("row", [p for p in rows("rollout_correction") if p.values[0]["weights"]])
def test_rollout_weights_and_their_statistics_equal_verls(row):
    arguments = row["arguments"]
    out = rollout_weights(
        ragged(row, "old_logprobs"),
        ragged(row, "rollout_logprobs"),
        level=ImportanceLevel(arguments["rollout_is"]),
        bounds=WeightBounds.parse(arguments["rollout_is_threshold"]),
        normalise=arguments.get("rollout_is_batch_normalize", False),
    )
    for ours, verls in zip(out.weights, ragged(row, "weights"), strict=True):
        assert list(ours) == pytest.approx(verls, rel=1e-5)
    verls = {name: value for name, value in row["metrics"].items() if "rollout_is" in name}
    # verl takes the spread as a float32 difference of squares: near 1 it is good to sqrt(2**-23) at best.
    std = "rollout_corr/rollout_is_std"
    assert out.statistics[std] == pytest.approx(verls.pop(std), rel=2e-5, abs=3.5e-4)
    assert {k: v for k, v in out.statistics.items() if k != std} == pytest.approx(verls, rel=2e-5, abs=5e-7)
