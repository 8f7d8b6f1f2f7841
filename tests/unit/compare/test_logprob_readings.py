"""How recorded log-probs are read off logits."""

import numpy as np
import pytest
import torch

from trainfer.check.compare.logits import misplaced_logprobs
from trainfer.check.compare.logprobs import ScoredTokens, fit_reading, plain, rescored_mean
from trainfer.check.compare.tolerance import tolerances
from trainfer.check.dump.records import SequenceRecord
from trainfer.types import SamplingParams

TAIL = 4 * tolerances().logprobs.tail_units * tolerances().unit["F32"]


def scored(recorded, logits, targets, **sampling) -> ScoredTokens:
    params = SamplingParams(max_new_tokens=1, **sampling)
    count = len(targets)
    return ScoredTokens(
        logits_SV=logits,
        targets_S=torch.tensor(targets),
        recorded_S=np.asarray(recorded, dtype=np.float64),
        sampling=(params,) * count,
        sequences=(0,) * count,
        positions=tuple(range(count)),
    )


def test_the_hand_check_of_the_temperature_case():
    """Logits 2, 1, 0, −1, token 0: −0.44019 raw, −0.14508 at 0.5."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert plain(scored([0], logits, [0]), 1.0)[0] == pytest.approx(-0.44019, abs=1e-5)
    assert plain(scored([0], logits, [0]), 0.5)[0] == pytest.approx(-0.14508, abs=1e-5)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * 3


TARGETS = list(range(12))


@pytest.mark.parametrize(
    ("reading", "make"),
    [
        ("declared", lambda raw, half: half),
        ("raw", lambda raw, half: raw),
        ("divided_after", lambda raw, half: raw / 0.5),
        ("unknown", lambda raw, half: raw - 0.3),
    ],
)
def test_the_reading_is_recognised(logits: torch.Tensor, reading: str, make):
    blank = scored(np.zeros(12), logits, TARGETS)
    tokens = scored(make(plain(blank, 1.0), plain(blank, 0.5)), logits, TARGETS, temperature=0.5)
    assert fit_reading(tokens, (), TAIL).reading == reading


def test_the_other_sides_temperature_is_tried_too(logits: torch.Tensor):
    blank = scored(np.zeros(12), logits, TARGETS)
    fit = fit_reading(scored(plain(blank, 0.7), logits, TARGETS), (0.7,), TAIL)
    assert (fit.reading, fit.temperature) == ("scaled", 0.7)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.3, 1.23456])
def test_a_temperature_that_nobody_declared_is_found(logits: torch.Tensor, temperature: float):
    blank = scored(np.zeros(12), logits, TARGETS)
    fit = fit_reading(scored(plain(blank, temperature), logits, TARGETS), (), TAIL)
    assert fit.reading == "scaled"
    assert fit.temperature == pytest.approx(temperature, rel=1e-6)
    divided = fit_reading(scored(plain(blank, 1.0) / temperature, logits, TARGETS), (), TAIL)
    assert divided.reading == "divided_after"
    assert divided.temperature == pytest.approx(temperature, rel=1e-6)


def test_few_tokens_find_no_temperature(logits: torch.Tensor):
    blank = scored(np.zeros(4), logits[:4], TARGETS[:4])
    assert fit_reading(scored(plain(blank, 0.7), logits[:4], TARGETS[:4]), (), TAIL).reading == "unknown"


def test_filters_are_part_of_what_is_declared(logits: torch.Tensor):
    blank = scored(np.zeros(12), logits, logits.argmax(1).tolist())
    kept = torch.topk(logits, 3).values.double()
    values = kept[:, 0] - torch.logsumexp(kept, 1)
    tokens = scored(values.numpy(), logits, blank.targets_S.tolist(), top_k=3)
    assert fit_reading(tokens, (), TAIL).reading == "declared"


def test_reading_alike_leaves_the_logits_difference(logits: torch.Tensor):
    first, second = scored(np.zeros(12), logits, TARGETS), scored(np.ones(12), logits + 0.0, TARGETS)
    assert rescored_mean(first, second) == 0.0


def misplaced(changes, *, other=None):
    """Two sequences with logits of every row; ``changes`` turns the right log-probs of the first into others."""
    generator = torch.Generator().manual_seed(1)
    sequences = [(3, 1, 4, 1, 5, 9, 6), (2, 7, 1, 8, 2, 8, 1)]
    logits = {(i, p): torch.randn(10, generator=generator) * 2 for i in range(2) for p in range(7)}

    def right(i: int, shift: int = 0) -> list[float]:
        return [
            torch.log_softmax(logits[i, p - 1 + shift], -1)[sequences[i][p + shift]].item()
            for p in range(2, 7)
            if p + shift < 7
        ]

    values = changes(right, logits)
    records = {
        i: SequenceRecord(
            index=i,
            tokens=sequences[i],
            prompt_length=2,
            logprobs=tuple(values if i == 0 else right(1)),
            sampling={},
            weights_version=0,
            step=0,
            pass_name="decode",
        )
        for i in range(2)
    }
    return misplaced_logprobs("train", records, logits, TAIL)


def test_right_log_probs_are_no_finding():
    assert misplaced(lambda right, logits: right(0)) == []


def test_log_probs_shifted_by_one_are_told_with_their_lag():
    (finding,) = misplaced(lambda right, logits: [*right(0, 1), -9.0])
    assert (finding.kind, finding.sequence, finding.lag) == ("train_logprobs", 0, 1)


def test_a_token_scored_by_its_own_row_is_told():
    def own(right, logits):
        ids = (3, 1, 4, 1, 5, 9, 6)
        return [torch.log_softmax(logits[0, p], -1)[ids[p]].item() for p in range(2, 7)]

    (finding,) = misplaced(own)
    assert (finding.kind, finding.sequence, finding.lag) == ("train_logprobs", 0, 1)
    assert "its own row" in finding.note


def test_a_roll_over_the_packed_row_scores_the_last_token_as_the_next_sequences_first():
    def roll(right, logits):
        return [*right(0)[:-1], torch.log_softmax(logits[0, 5], -1)[2].item()]

    (finding,) = misplaced(roll)
    assert finding.other_sequence == 1
    assert "last token" in finding.note


def test_log_probs_of_another_sample_are_told():
    (finding,) = misplaced(lambda right, logits: right(1))
    assert finding.other_sequence == 1
