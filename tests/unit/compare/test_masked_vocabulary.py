"""Log-probs of a side that masks the end of its vocabulary: the width is read from what it recorded."""

import torch

from trainfer.check.compare.logprobs import ScoredTokens, fit_reading
from trainfer.types import SamplingParams

TOLERANCE = 1e-5


def _tokens(recorded, logits, targets, temperature=1.0):
    count = len(targets)
    return ScoredTokens(
        logits_SV=logits,
        targets_S=targets,
        recorded_S=recorded.double().numpy(),
        sampling=(SamplingParams(max_new_tokens=count, temperature=temperature),) * count,
        sequences=(0,) * count,
        positions=tuple(range(count)),
    )


def _logits(count=40, width=100):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator), torch.randint(0, 80, (count,), generator=generator)


def test_the_width_that_took_part_is_found_at_any_temperature():
    logits, targets = _logits()
    for temperature in (1.0, 0.7):
        masked = (logits[:, :91] / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]
        fit = fit_reading(_tokens(masked, logits, targets, temperature), (), TOLERANCE)
        assert (fit.reading, fit.width, fit.temperature) == ("cut", 91, temperature)
        assert fit.declared_worst > 0.01


def test_the_whole_vocabulary_is_no_cut():
    logits, targets = _logits()
    whole = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    fit = fit_reading(_tokens(whole, logits, targets), (), TOLERANCE)
    assert (fit.reading, fit.width) == ("declared", None)


def test_log_probs_that_are_merely_off_are_no_cut():
    logits, targets = _logits()
    off = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    off = off + 0.05 * torch.rand(len(off), generator=torch.Generator().manual_seed(1))
    assert fit_reading(_tokens(off, logits, targets), (), TOLERANCE).reading == "unknown"


def test_a_few_tokens_prove_no_width():
    logits, targets = _logits(count=4)
    masked = logits[:, :91].log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert fit_reading(_tokens(masked, logits, targets), (), TOLERANCE).reading == "unknown"
