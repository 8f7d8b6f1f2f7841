"""Requests and sequences of a step: groups, seeds, pairing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import EngineError
from trainfer.train.rollout.sample import Purpose, collect, plan_rollout, sequence_seed
from trainfer.types import Completion, FinishReason, Message, Prompt, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5)


class AlphabetDecoder:
    """Token 1 is ``a``; token 0 is special."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(96 + token) for token in token_ids if token or not skip_special_tokens)


def prompt(index):
    return Prompt(
        index=index,
        data_source="s",
        messages=(Message(role="user", content="x"),),
        token_ids=(index, 7),
        ground_truth="t",
    )


def plan(*indices, samples=3, **changes):
    options = {"run_seed": 1, "step": 2, "sampling": SAMPLING, **changes}
    return plan_rollout([prompt(i) for i in indices], samples_per_prompt=samples, **options)


def answers(a_plan):
    return [
        Completion(
            request_id=request.request_id,
            token_ids=(position + 1, 0),
            logprobs=(-0.5, -float(position)),
            finish_reason=FinishReason.STOP,
            weights_version=9,
        )
        for position, request in enumerate(a_plan.requests)
    ]


def test_requests_come_prompt_by_prompt_with_the_groups_prompt_equal():
    requests = plan(40, 41).requests
    assert [request.prompt_ids for request in requests] == [(40, 7)] * 3 + [(41, 7)] * 3
    assert len({request.request_id for request in requests}) == 6
    assert len({request.seed for request in requests}) == 6
    assert all(request.sampling is SAMPLING for request in requests)


def test_the_seed_is_pinned():
    """A change would break the trajectory of every resumed run."""
    assert (
        sequence_seed(run_seed=1, purpose=Purpose.TRAIN, step=2, prompt_index=3, sample_index=4)
        == 9639247598758999539
    )


@settings(deadline=None)
@given(st.integers(0, 2**64), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 10**4))
def test_seeds_fit_64_bits_and_every_number_matters(run_seed, step, prompt_index, sample_index):
    base = {"run_seed": run_seed, "step": step, "prompt_index": prompt_index, "sample_index": sample_index}
    seed = sequence_seed(purpose=Purpose.TRAIN, **base)
    assert 0 <= seed < 2**64
    others = [{**base, name: value + 1} for name, value in base.items()]
    assert all(sequence_seed(purpose=Purpose.TRAIN, **other) != seed for other in others)
    assert sequence_seed(purpose=Purpose.VALIDATION, **base) != seed


def test_a_sequences_seed_does_not_depend_on_its_neighbours():
    alone = {r.request_id: r.seed for r in plan(41).requests}
    together = {r.request_id: r.seed for r in plan(40, 41, 42, samples=8).requests}
    assert alone.items() <= together.items()


def test_completions_become_sequences_of_their_groups():
    a_plan = plan(40, 41)
    sequences = collect(a_plan, answers(a_plan), AlphabetDecoder())
    assert [(s.group, s.sample_index, s.prompt.index) for s in sequences] == [
        (0, 0, 40),
        (0, 1, 40),
        (0, 2, 40),
        (1, 0, 41),
        (1, 1, 41),
        (1, 2, 41),
    ]
    fifth = sequences[4]
    assert fifth.response_text == "e"
    assert fifth.response_ids == (5, 0)
    assert fifth.token_ids == (41, 7, 5, 0)
    assert fifth.rollout_logprobs == (-0.5, -4.0)
    assert (fifth.weights_version, fifth.finish_reason, fifth.seed) == (
        9,
        FinishReason.STOP,
        a_plan.requests[4].seed,
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c[:-1], "5 completions for 6 requests"),
        (lambda c: c + c[:1], "7 completions for 6 requests"),
        (lambda c: [c[1], c[0], *c[2:]], "in the order of the requests"),
        (lambda c: [replace(c[0], logprobs=(0.0,)), *c[1:]], "2 tokens and 1 log-probs"),
        (lambda c: [replace(c[0], token_ids=(), logprobs=()), *c[1:]], "0 tokens and 0 log-probs"),
    ],
)
def test_answers_that_do_not_fit_are_refused(spoil, message):
    a_plan = plan(40, 41)
    with pytest.raises(EngineError, match=message):
        collect(a_plan, spoil(answers(a_plan)), AlphabetDecoder())
