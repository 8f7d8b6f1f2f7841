"""The supervised warm-up: its loss is Transformers' own, it is deterministic, it teaches."""

import copy
import math

import pytest
import torch

from trainfer.errors import ConfigError, DataError
from trainfer.integrations.transformers.tiny import tiny_model
from trainfer.train.update.warmup import (
    Example,
    WarmupSettings,
    demonstration_examples,
    learning_rate,
    warm_up,
)
from trainfer.types import Message, Prompt

EXAMPLES = [Example(prompt_ids=(5, 6 + i), answer_ids=(20 + i, 30 + i, 1)) for i in range(4)]


def small_model():
    return tiny_model("qwen3", vocab_size=40, hidden_size=32, num_layers=1, intermediate_size=32)


def settings(**changes):
    return WarmupSettings(**{"steps": 3, "batch_size": 4, "lr": 1e-2, "seed": 1, **changes})


def test_the_loss_is_the_mean_cross_entropy_of_the_answers_that_transformers_gives():
    model = small_model()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    example = EXAMPLES[2]
    report = warm_up(model, [example], settings(steps=1, batch_size=5))
    ids = torch.tensor([example.prompt_ids + example.answer_ids])
    labels = ids.clone()
    labels[:, :2] = -100
    with torch.no_grad():
        expected = reference(input_ids=ids, labels=labels).loss
    assert report.losses == pytest.approx([expected.item()], abs=1e-5)


def test_it_learns_answers_to_the_letter():
    model = small_model()
    report = warm_up(model, EXAMPLES, settings(steps=120, batch_size=8))
    assert report.losses[0] > 3.0
    assert report.losses[-1] < 0.05
    model.set_attn_implementation("eager")
    for example in EXAMPLES:
        ids = torch.tensor([example.prompt_ids + example.answer_ids])
        with torch.no_grad():
            told = model(input_ids=ids).logits[0, 1:-1].argmax(-1)
        assert tuple(told.tolist()) == example.answer_ids


def test_equal_settings_give_equal_weights_and_another_seed_does_not():
    def weights(**changes):
        model = small_model()
        warm_up(model, EXAMPLES, settings(**changes))
        return model.state_dict()

    first, again, other = weights(), weights(), weights(seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_model_comes_back_in_its_mode_without_gradients_and_steps_are_told():
    model = small_model()
    told = []
    report = warm_up(model, EXAMPLES, settings(), on_step=lambda step, loss: told.append((step, loss)))
    assert told == list(zip([1, 2, 3], report.losses, strict=True))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_steps_leave_the_weights_alone():
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    assert warm_up(model, [], settings(steps=0)).losses == ()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_learning_rate_rises_over_a_twentieth_and_falls_to_a_twentieth():
    plan = settings(steps=100, lr=1.0)
    assert [learning_rate(plan, step) for step in (0, 4)] == pytest.approx([0.2, 1.0])
    assert learning_rate(plan, 99) == pytest.approx(0.05)
    assert learning_rate(plan, 52) == pytest.approx(0.05 + 0.95 * 47 / 95)
    assert learning_rate(settings(steps=1, lr=1.0), 0) == 1.0


def test_a_loss_that_is_not_finite_is_told_with_the_key_to_lower():
    model = small_model()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").fill_(math.nan)
    with pytest.raises(ConfigError, match=r"trainfer\.warmup\.lr=0\.01"):
        warm_up(model, EXAMPLES, settings())


def test_no_examples_are_refused():
    with pytest.raises(DataError, match="no examples"):
        warm_up(small_model(), [], settings())


def prompt(extra_info):
    return Prompt(
        index=3,
        data_source="s",
        messages=(Message(role="user", content="x"),),
        token_ids=(9, 8),
        ground_truth="t",
        extra_info=extra_info,
    )


def test_each_demonstration_of_a_row_is_an_example_that_ends():
    found = demonstration_examples(
        [prompt({"demonstrations": ["ab", "c"]})], lambda text: [ord(c) for c in text], end_token_id=1
    )
    assert found == [
        Example(prompt_ids=(9, 8), answer_ids=(97, 98, 1)),
        Example(prompt_ids=(9, 8), answer_ids=(99, 1)),
    ]


@pytest.mark.parametrize(
    "extra_info", [{}, {"demonstrations": "ab"}, {"demonstrations": []}, {"demonstrations": [1]}]
)
def test_rows_without_demonstrations_are_refused(extra_info):
    with pytest.raises(DataError, match=r"row 3: extra_info\.demonstrations"):
        demonstration_examples([prompt(extra_info)], list, end_token_id=1)
