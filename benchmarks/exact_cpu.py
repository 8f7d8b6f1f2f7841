"""What exact mode costs on a CPU: the same engine and trainer with exact mode on and off, turn by turn, one thread.

    OMP_NUM_THREADS=1 python benchmarks/exact_cpu.py [--rounds 9] [--dtype float32] [--new 64]

Off means: keys are padded to whole vectors only, query rows are not cut at safe lengths, and a decode step has as many
rows as sequences. (A packed batch keeps its up to 7 dummy rows of a thousand.) The libraries' kernels are the same on both sides, since the exact ones are the fast
ones here. The model is Qwen2-shaped with 3.7 M parameters (hidden 256, 4 layers, 4/2 heads, MLP 768, vocabulary 1024).
CPU seconds of this process; ratios are medians of paired ratios.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from trainfer.engines.registry import make_engine
from trainfer.exact.calibration import calibrate
from trainfer.exact.rules import ORDINARY, KeyLengths, using_key_lengths
from trainfer.integrations.transformers.load import tiny_model
from trainfer.train.update.aggregate import LossAggregation
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.logprob import ForwardLimit
from trainfer.train.update.loss import LossSettings
from trainfer.train.update.master import MasterWeights
from trainfer.train.update.schedule import LearningRate
from trainfer.train.update.trainer import Trainer, TrainerSettings
from trainfer.types import GenerationRequest, SamplingParams, TrainingSequence

VOCABULARY = 1024


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    return tiny_model(
        "qwen2", vocab_size=VOCABULARY, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2,
        intermediate_size=768, dtype=dtype,
    )  # fmt: skip


class Case:
    """One load: prompts of these lengths, four samples each."""

    def __init__(self, name: str, prompts: list[int], new: int, dtype: torch.dtype) -> None:
        numbers = random.Random(0)
        self.name = name
        ids = [tuple(numbers.randrange(5, VOCABULARY) for _ in range(length)) for length in prompts]
        sampling = SamplingParams(max_new_tokens=new)
        self.requests = [
            GenerationRequest(request_id=f"{p}.{g}", prompt_ids=prompt, seed=100 * p + g, sampling=sampling)
            for p, prompt in enumerate(ids)
            for g in range(4)
        ]
        self.engine = make_engine("builtin", model=make_model(dtype))
        self.trainer = Trainer(
            MasterWeights(make_model(torch.float32), compute_dtype=dtype),
            TrainerSettings(
                loss=LossSettings(),
                aggregation=LossAggregation("token-mean"),
                horizon=new,
                limit=ForwardLimit(sequences=len(self.requests)),
                learning_rate=LearningRate(peak=1e-4),
            ),
            device="cpu",
        )
        sequences = [
            TrainingSequence(
                token_ids=request.prompt_ids + tuple(numbers.randrange(5, VOCABULARY) for _ in range(new)),
                prompt_length=len(request.prompt_ids),
                temperature=1.0,
                old_logprobs=None,
                ref_logprobs=None,
                advantages=(numbers.uniform(-1, 1),) * new,
                loss_mask=(True,) * new,
            )
            for request in self.requests
        ]
        self.batch = MiniBatch.whole(sequences)

    def sample(self) -> None:
        self.engine.generate(self.requests)

    def train(self) -> None:
        self.trainer.update([self.batch])


def seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(case: Case, safe: KeyLengths, rounds: int) -> None:
    def exact() -> tuple[float, float]:
        with using_key_lengths(safe):
            return seconds(case.sample), seconds(case.train)

    def ordinary() -> tuple[float, float]:
        with using_key_lengths(ORDINARY):
            return seconds(case.sample), seconds(case.train)

    exact()
    ordinary()
    pairs = [(exact(), ordinary()) for _ in range(rounds)]
    columns = {
        "decode": [on[0] / off[0] for on, off in pairs],
        "update": [on[1] / off[1] for on, off in pairs],
        "step": [sum(on) / sum(off) for on, off in pairs],
    }
    best = [min(sum(side) for side in sides) for sides in zip(*pairs, strict=True)]
    words = "   ".join(f"{name} {statistics.median(ratios):.3f}" for name, ratios in columns.items())
    print(
        f"{case.name:34} {words}   (best step: exact {best[0]:.3f} s, ordinary {best[1]:.3f} s)", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--new", type=int, default=64, help="new tokens a sequence")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    found = calibrate(make_model(dtype))
    for problem in found.problems:
        print(f"not exact here: {problem}")
    safe = KeyLengths(safe=found.safe_key_lengths, decode_rows=found.decode_rows)
    for name, prompts in (
        ("4 prompts of 29, 4 samples", [29] * 4),
        ("4 ragged prompts 10..120, 4 samples", [10, 40, 75, 120]),
        ("3 prompts of 29, 4 samples", [29] * 3),
        ("2 prompts of 170, crossing 192", [170] * 2),
    ):
        measure(Case(f"{name}, {arguments.new} new", prompts, arguments.new, dtype), safe, arguments.rounds)


if __name__ == "__main__":
    main()
