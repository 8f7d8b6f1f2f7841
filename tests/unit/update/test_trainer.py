import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainfer.integrations.transformers.load import tiny_model
from trainfer.train.update.aggregate import LossAggregation, MiniBatchTotals
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.logprob import ForwardLimit, score_sequences
from trainfer.train.update.loss import LossSettings
from trainfer.train.update.master import MasterWeights
from trainfer.train.update.schedule import LearningRate
from trainfer.train.update.trainer import Trainer, TrainerSettings, update_metrics
from trainfer.types import FinishReason, Prompt, SampledSequence, SamplingParams, TrainingSequence

VOCABULARY = 48
MODEL = tiny_model("qwen3", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, dtype=torch.float64)


def trainer_settings(*, limit=None, **kwargs):
    defaults = {
        "loss": LossSettings(),
        "aggregation": LossAggregation.TOKEN_MEAN,
        "horizon": 16,
        "limit": limit or ForwardLimit(sequences=64),
        "learning_rate": LearningRate(peak=1e-2),
    }
    return TrainerSettings(**(defaults | kwargs))


def trainer(model=MODEL, *, compute_dtype=None, **kwargs):
    model = copy.deepcopy(model)
    dtype = compute_dtype or next(model.parameters()).dtype
    return Trainer(MasterWeights(model, compute_dtype=dtype), trainer_settings(**kwargs), device="cpu")


def sequence(seed, *, length=None, **kwargs):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    prompt_length, response_length = draw(1, 6), length or draw(1, 14)
    ids = torch.randint(0, VOCABULARY, (prompt_length + response_length,), generator=generator).tolist()
    old = (-torch.rand(response_length, generator=generator) * 0.2 - math.log(VOCABULARY)).tolist()
    advantage = float(torch.randn(1, generator=generator))
    fields = {
        "token_ids": tuple(ids),
        "prompt_length": prompt_length,
        "temperature": 1.0,
        "old_logprobs": tuple(old),
        "ref_logprobs": tuple(value - 0.1 for value in old),
        "advantages": (advantage,) * response_length,
        "loss_mask": (True,) * response_length,
    }
    return TrainingSequence(**(fields | kwargs))


def gradients(model, sequences, **kwargs):
    subject = trainer(model, **kwargs)
    subject.forward_backward(MiniBatch.whole(sequences))
    flat = [p.grad.flatten().double() for p in subject.weights.master.parameters() if p.grad is not None]
    return torch.cat(flat)


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), aggregation=st.sampled_from(list(LossAggregation)), tokens=st.booleans())
def test_micro_batch_size_order_and_packing_do_not_change_the_gradient(data, aggregation, tokens):
    sequences = [sequence(seed) for seed in range(data.draw(st.integers(2, 9), label="count"))]
    order = data.draw(st.permutations(range(len(sequences))), label="order")
    size = data.draw(st.integers(20, 80) if tokens else st.integers(1, 9), label="size")
    limit = ForwardLimit(tokens=size) if tokens else ForwardLimit(sequences=size)
    loss = LossSettings(entropy_coeff=0.01, kl_loss_coef=0.1)
    whole = gradients(MODEL, sequences, aggregation=aggregation, loss=loss)
    split = gradients(MODEL, [sequences[i] for i in order], aggregation=aggregation, loss=loss, limit=limit)
    # log-softmax is float32 by contract, so its backward rounds; the rest is float64 here.
    assert relative(split, whole) <= 1e-7


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2"])
def test_in_float32_too_the_gradient_moves_by_rounding_alone(architecture):
    model = tiny_model(architecture, vocab_size=VOCABULARY)
    sequences = [sequence(seed) for seed in range(8)]
    whole = gradients(model, sequences)
    for size in (1, 3, 5):
        assert relative(gradients(model, sequences[::-1], limit=ForwardLimit(sequences=size)), whole) <= 1e-6


def test_the_gradient_of_two_ranks_adds_up_to_that_of_one():
    sequences = [sequence(seed) for seed in range(6)]
    totals = MiniBatchTotals(tokens=sum(len(s.advantages) for s in sequences), sequences=6)
    subject = trainer()
    for part in (sequences[:2], sequences[2:]):
        subject.forward_backward(MiniBatch(sequences=tuple(part), totals=totals))
    flat = torch.cat([p.grad.flatten() for p in subject.weights.master.parameters()])
    assert relative(flat, gradients(MODEL, sequences)) <= 1e-7


def test_the_gradient_is_the_finite_difference_of_the_reported_loss():
    batch = MiniBatch.whole([sequence(seed) for seed in range(3)])
    subject = trainer(loss=LossSettings(clip_ratio_low=0.9, clip_ratio_high=9.0))
    weight = subject.weights.master.get_parameter("model.layers.0.mlp.down_proj.weight")
    subject.forward_backward(batch)
    assert weight.grad is not None
    steepest = weight.grad.norm().item()
    direction = weight.grad / steepest

    def loss_at(step):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            loss = subject.forward_backward(batch)[0][0].item()
            weight.sub_(direction, alpha=step)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", lambda self: None)
        slope = (loss_at(0.02) - loss_at(-0.02)) / 0.04
    assert slope == pytest.approx(steepest, rel=1e-3)


def test_without_old_logprobs_the_update_is_exactly_on_policy():
    sequences = [sequence(seed, old_logprobs=None) for seed in range(4)]
    result = trainer(loss=LossSettings(), limit=ForwardLimit(sequences=2)).update(
        [MiniBatch.whole(sequences)]
    )
    step = result.steps[0]
    assert step.ppo_kl == 0.0
    assert step.pg_clipfrac == 0.0
    tokens = sum(len(s.advantages) for s in sequences)
    expected = -sum(sum(s.advantages) for s in sequences) / tokens
    assert step.pg_loss == pytest.approx(expected, rel=1e-6)
    assert [len(score.logprobs) for score in result.first_scores] == [len(s.advantages) for s in sequences]


def as_sampled(item):
    return SampledSequence(
        prompt=Prompt(
            index=0,
            data_source="",
            messages=(),
            token_ids=item.token_ids[: item.prompt_length],
            ground_truth="",
        ),
        sample_index=0,
        group=0,
        seed=0,
        sampling=SamplingParams(max_new_tokens=64),
        response_ids=item.token_ids[item.prompt_length :],
        response_text="",
        rollout_logprobs=(),
        finish_reason=FinishReason.LENGTH,
        weights_version=0,
    )


def test_the_shortcut_trains_exactly_as_stored_old_logprobs_do():
    model = tiny_model("qwen3", vocab_size=VOCABULARY)
    stored, shortcut = trainer(model), trainer(model)
    plain = [sequence(seed) for seed in range(4)]
    scores = score_sequences(
        stored.weights.compute, [as_sampled(s) for s in plain], limit=ForwardLimit(sequences=3), device="cpu"
    )
    with_scores = [sequence(seed, old_logprobs=score.logprobs) for seed, score in enumerate(scores)]
    stored.update([MiniBatch.whole(with_scores)])
    result = shortcut.update([MiniBatch.whole([sequence(seed, old_logprobs=None) for seed in range(4)])])
    assert result.first_scores == tuple(scores)
    for one, other in zip(
        stored.weights.master.parameters(), shortcut.weights.master.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_several_optimizer_steps_need_stored_old_logprobs():
    batch = MiniBatch.whole([sequence(0, old_logprobs=None)])
    with pytest.raises(AssertionError):
        trainer().update([batch, batch])


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    subject = trainer()
    before = copy.deepcopy(subject.weights.master.state_dict())
    poisoned = sequence(0, advantages=(math.nan,) * len(sequence(0).advantages))
    result = subject.update([MiniBatch.whole([poisoned]), MiniBatch.whole([sequence(1)])])
    assert [step.skipped for step in result.steps] == [True, False]
    assert subject.optimizer_steps == 1
    assert update_metrics(result.steps, kl_coef=None)["actor/skipped_steps"] == 1.0
    assert math.isfinite(update_metrics(result.steps, kl_coef=None)["actor/grad_norm"])
    only_good = trainer()
    only_good.update([MiniBatch.whole([sequence(1)])])
    for name, tensor in subject.weights.master.state_dict().items():
        assert torch.equal(tensor, only_good.weights.master.state_dict()[name])
    assert any(not torch.equal(before[name], t) for name, t in subject.weights.master.state_dict().items())


def test_the_gradient_norm_is_reported_before_clipping_and_clipping_bounds_the_step():
    sequences = [sequence(seed) for seed in range(3)]
    norm = gradients(MODEL, sequences).norm().item()
    subject = trainer(grad_clip=norm / 100)
    captured = []
    subject.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: captured.append(
            torch.cat([p.grad.flatten() for p in subject.weights.master.parameters()]).norm().item()
        )
    )
    result = subject.update([MiniBatch.whole(sequences)])
    assert result.steps[0].grad_norm == pytest.approx(norm)
    assert captured == [pytest.approx(norm / 100, rel=1e-3)]


def test_a_masked_token_does_not_train():
    masked = sequence(0, length=3, advantages=(1.0, 50.0, 1.0), loss_mask=(True, False, True))
    other = sequence(0, length=3, advantages=(1.0, -7.0, 1.0), loss_mask=(True, False, True))
    assert torch.equal(gradients(MODEL, [masked]), gradients(MODEL, [other]))


def test_the_schedule_moves_once_per_update():
    rate = LearningRate(peak=1.0, warmup_updates=2)
    subject = trainer(learning_rate=rate)
    batch = MiniBatch.whole([sequence(0)])
    rates = [[step.lr for step in subject.update([batch, batch]).steps] for _ in range(3)]
    assert rates == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]


def test_masters_keep_what_bfloat16_would_round_away():
    model = tiny_model("llama", vocab_size=VOCABULARY)
    subject = trainer(model, compute_dtype=torch.bfloat16, learning_rate=LearningRate(peak=1e-6))
    start = copy.deepcopy(subject.weights.master.state_dict())
    for _ in range(3):
        subject.update([MiniBatch.whole([sequence(seed) for seed in range(4)])])
    moved = [not torch.equal(start[n], t) for n, t in subject.weights.master.state_dict().items()]
    assert any(moved)
    masters = dict(subject.weights.master.named_parameters())
    for name, parameter in subject.weights.compute.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    assert all(buffer.dtype == torch.float32 for buffer in subject.weights.compute.buffers())


def test_in_bfloat16_gradients_of_micro_batches_add_up_in_float32():
    model = tiny_model("llama", vocab_size=VOCABULARY)
    sequences = [sequence(seed) for seed in range(6)]
    parts = [
        gradients(model, [s], compute_dtype=torch.bfloat16, aggregation=LossAggregation.TOKEN_SUM)
        for s in sequences
    ]
    whole = gradients(
        model,
        sequences,
        compute_dtype=torch.bfloat16,
        aggregation=LossAggregation.TOKEN_SUM,
        limit=ForwardLimit(sequences=1),
    )
    assert relative(torch.stack(parts).sum(0), whole) <= 1e-6
