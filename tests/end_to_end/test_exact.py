"""Rollout and training log-probs are the same bits, step after step, whatever the batch looks like."""

import random
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from trainfer.engines.builtin.engine import BuiltinEngine
from trainfer.engines.limits import EngineLimits
from trainfer.exact.calibration import calibrate
from trainfer.exact.rules import KeyLengths, using_key_lengths
from trainfer.integrations.transformers.load import tiny_model
from trainfer.train.update.aggregate import LossAggregation
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.logprob import ForwardLimit, score_sequences
from trainfer.train.update.loss import LossSettings
from trainfer.train.update.master import MasterWeights
from trainfer.train.update.schedule import LearningRate
from trainfer.train.update.trainer import Trainer, TrainerSettings
from trainfer.types import (
    Completion,
    GenerationRequest,
    Prompt,
    SampledSequence,
    SamplingParams,
    TrainingSequence,
)
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.weights import sync_weights

VOCABULARY = 261
LONGEST = 1100


class Side:
    """A trainer and an engine, each with a model of its own, as one rank has them."""

    def __init__(self, architecture: str, dtype: torch.dtype, numbers: random.Random) -> None:
        # Gates of 80 decode by the modules, gates of 96 by the fused forward.
        intermediate = numbers.choice([80, 96])

        def make(seed: int, dtype: torch.dtype) -> PreTrainedModel:
            return tiny_model(
                architecture,
                hidden_size=48,
                intermediate_size=intermediate,
                vocab_size=VOCABULARY,
                seed=seed,
                dtype=dtype,
            )

        model = make(0, torch.float32)
        self.weights = MasterWeights(model, compute_dtype=dtype)
        self.rollout = RolloutWorker(BuiltinEngine(make(1, dtype), limits=random_limits(numbers)))
        self.trainer = Trainer(
            self.weights,
            TrainerSettings(
                loss=LossSettings(),
                aggregation=LossAggregation("token-mean"),
                horizon=LONGEST,
                limit=ForwardLimit(sequences=numbers.randrange(1, 5)),
                learning_rate=LearningRate(peak=3e-3),
            ),
            device="cpu",
        )
        self.sync(dtype)

    def sync(self, dtype: torch.dtype) -> None:
        proof = sync_weights(
            self.weights.compute, self.rollout, version=self.trainer.optimizer_steps, dtype=dtype
        )
        assert proof.matches


def random_limits(numbers: random.Random) -> EngineLimits:
    """Few slots and small passes: sequences come and go, groups are torn apart."""
    return EngineLimits(
        max_num_seqs=numbers.choice([1, 3, 8, 64]),
        max_num_batched_tokens=numbers.choice([40, 300, 8192]),
        block_size=numbers.choice([4, 16]),
        share_prefixes=numbers.random() < 0.7,
    )


def random_requests(numbers: random.Random, *, long: bool) -> Iterator[GenerationRequest]:
    for group in range(numbers.randrange(1, 4)):
        length = numbers.choice([1, 5, 17, 40, 180, 260] + ([500, 900] if long else []))
        prompt = tuple(numbers.randrange(5, VOCABULARY) for _ in range(length))
        for member in range(numbers.randrange(1, 4)):
            new = numbers.choice([1, 3, 20] + ([LONGEST - length] if long and length > 800 else [50]))
            yield GenerationRequest(
                request_id=f"{group}.{member}",
                prompt_ids=prompt,
                seed=numbers.getrandbits(60),
                sampling=SamplingParams(max_new_tokens=min(new, 200), temperature=numbers.choice([1.0, 0.7])),
            )


def sampled(request: GenerationRequest, completion: Completion) -> SampledSequence:
    prompt = Prompt(index=0, data_source="test", messages=(), token_ids=request.prompt_ids, ground_truth="")
    return SampledSequence(
        prompt=prompt, sample_index=0, group=0, seed=request.seed, sampling=request.sampling,
        response_ids=completion.token_ids, response_text="", rollout_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason, weights_version=completion.weights_version,
    )  # fmt: skip


def training(sequence: SampledSequence, advantage: float) -> TrainingSequence:
    count = len(sequence.response_ids)
    return TrainingSequence(
        token_ids=sequence.token_ids, prompt_length=len(sequence.prompt.token_ids),
        temperature=sequence.sampling.temperature, old_logprobs=None, ref_logprobs=None,
        advantages=(advantage,) * count, loss_mask=(True,) * count,
    )  # fmt: skip


def run_steps(architecture: str, dtype: torch.dtype, *, steps: int, threads: int, seed: int) -> int:
    """Sample, score in another batch, update, hand over; every token of every step is compared. Gives their number."""
    numbers = random.Random(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    tokens = 0
    try:
        side = Side(architecture, dtype, numbers)
        found = calibrate(side.weights.compute)
        assert found.is_exact, [str(problem) for problem in found.problems]
        rules = KeyLengths(safe=found.safe_key_lengths, decode_rows=found.decode_rows)
        with using_key_lengths(rules):
            for step in range(steps):
                requests = list(random_requests(numbers, long=step % 10 == 0))
                completions = side.rollout.generate(requests)
                sequences = [sampled(*pair) for pair in zip(requests, completions, strict=True)]
                numbers.shuffle(sequences)
                rolled = torch.tensor([lp for s in sequences for lp in s.rollout_logprobs])
                limit = ForwardLimit(sequences=numbers.randrange(1, 6))
                apart = score_sequences(side.weights.compute, sequences, limit=limit, device="cpu")
                assert torch.equal(torch.tensor([lp for s in apart for lp in s.logprobs]), rolled), step
                batch = MiniBatch.whole([training(s, numbers.uniform(-1, 1)) for s in sequences])
                result = side.trainer.update([batch])
                trained = torch.tensor([lp for s in result.first_scores for lp in s.logprobs])
                assert torch.equal(trained, rolled), step
                side.sync(dtype)
                tokens += len(rolled)
        assert side.trainer.optimizer_steps == steps, "every update changed the weights"
    finally:
        torch.set_num_threads(before)
    return tokens


@pytest.mark.parametrize(("threads", "steps"), [(1, 6), (2, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_steps_are_exact(bitwise_cpu, dtype, threads, steps):
    assert run_steps("qwen3", dtype, steps=steps, threads=threads, seed=3) > 100


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("architecture", "dtype", "threads"),
    [
        ("qwen2", torch.float32, 1),
        ("qwen3", torch.bfloat16, 1),
        ("llama", torch.float32, 2),
        ("qwen2", torch.bfloat16, 2),
    ],
)
def test_a_hundred_steps_are_exact(bitwise_cpu, architecture, dtype, threads):
    assert run_steps(architecture, dtype, steps=100, threads=threads, seed=threads) > 5000


@pytest.fixture
def bitwise_cpu() -> None:
    """Skip where this processor's library has no row-invariant operators: exact mode refuses there."""
    found = calibrate(tiny_model("qwen2"))
    if not found.is_exact:
        pytest.skip(f"exact mode is refused here: {found.problems[0]}")
