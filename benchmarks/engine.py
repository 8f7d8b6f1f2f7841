"""Tokens per CPU second: the builtin engine against Transformers' generate, one thread, paired.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--rounds 7] [--prompts 4] [--group 4] [--new 64]

Both sample the same requests from the same random 3.7 M model (Qwen2-shaped: hidden 256, 4 layers, 4/2 heads,
MLP 768, vocabulary 1024), turn by turn, so that what else the machine does hits both. CPU seconds of this
process, medians over the rounds; the ratio is the median of the paired ratios.
"""

import argparse
import random
import statistics
import time

import torch

from trainfer.engines.registry import make_engine
from trainfer.integrations.transformers.load import tiny_model
from trainfer.train.rollout.engine import Engine
from trainfer.types import GenerationRequest, SamplingParams

VOCAB_SIZE = 1024


def build(name: str) -> Engine:
    model = tiny_model(
        "qwen2",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=768,
    )
    return make_engine(name, model=model)


def make_requests(prompts: int, group: int, new: int) -> list[GenerationRequest]:
    numbers = random.Random(0)
    sampling = SamplingParams(max_new_tokens=new)
    ids = [
        tuple(numbers.randrange(5, VOCAB_SIZE) for _ in range(numbers.randrange(16, 48)))
        for _ in range(prompts)
    ]
    return [
        GenerationRequest(request_id=f"{p}.{g}", prompt_ids=ids[p], seed=1000 * p + g, sampling=sampling)
        for p in range(prompts)
        for g in range(group)
    ]


def cpu_seconds(engine: Engine, requests: list[GenerationRequest]) -> float:
    start = time.process_time()
    engine.generate(requests)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="new tokens a sequence")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    requests = make_requests(arguments.prompts, arguments.group, arguments.new)
    engines = {name: build(name) for name in ("builtin", "hf")}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.generate(requests)
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            seconds[name].append(cpu_seconds(engine, requests))
    tokens = len(requests) * arguments.new
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:8} {median:.3f} CPU s (best {min(values):.3f})   {tokens / median:,.0f} tokens per CPU second"
        )
    ratios = [ours / theirs for ours, theirs in zip(seconds["builtin"], seconds["hf"], strict=True)]
    print(
        f"builtin / hf, CPU time: {statistics.median(ratios):.2f} (range {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
