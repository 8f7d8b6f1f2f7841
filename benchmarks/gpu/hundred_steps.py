"""Bitwise equality over many updates on a CUDA device, with float32 masters and an engine of its own weights.

    python benchmarks/gpu/hundred_steps.py [--steps 100] [--shape qwen3-0.6b|smollm2-135m]

Each step samples a random number of sequences with random lengths, scores them in the training forward in random
micro-batches, compares every log-prob, makes an AdamW step on float32 masters, sends the weights to the engine and
compares the fingerprints. Exits with 1 if any bit differs.
"""

import argparse
import random
import sys
import time

import torch
from shapes import VOCABULARY, qwen3_06b, smollm2_135m
from torch import nn

from trainfer.engines.limits import EngineLimits
from trainfer.engines.module_weights import fingerprints
from trainfer.engines.registry import make_engine
from trainfer.exact.packed import pack
from trainfer.exact.scores import forward_scores
from trainfer.train.update.master import MasterWeights
from trainfer.types import GenerationRequest, SamplingParams

SHAPES = {"qwen3-0.6b": qwen3_06b, "smollm2-135m": smollm2_135m}


def random_requests(numbers: random.Random) -> list[GenerationRequest]:
    group = numbers.choice((1, 2, 4))
    requests = []
    for p in range(numbers.randint(2, 16)):
        ids = tuple(numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 300)))
        for g in range(group):
            params = SamplingParams(
                max_new_tokens=numbers.randint(1, 64), temperature=numbers.choice((1.0, 0.7))
            )
            requests.append(
                GenerationRequest(
                    request_id=f"{p}.{g}", prompt_ids=ids, seed=numbers.getrandbits(40), sampling=params
                )
            )
    return requests


@torch.no_grad()
def total_of(model: nn.Module) -> float:
    return float(sum(parameter.double().sum() for parameter in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    arguments = parser.parse_args()
    make = SHAPES[arguments.shape]
    weights = MasterWeights(make(dtype=torch.float32), compute_dtype=torch.bfloat16)
    engine = make_engine("builtin", model=make(), limits=EngineLimits(max_num_seqs=32))
    engine.load_weights(weights.master.state_dict().items(), version=0)
    optimizer = torch.optim.AdamW(weights.trainable(), lr=2e-5, fused=True)
    numbers = random.Random(0)
    tokens = equal = 0
    start = time.perf_counter()
    first = total_of(weights.master)
    for step in range(arguments.steps):
        requests = random_requests(numbers)
        pairs = list(zip(requests, engine.generate(requests), strict=True))
        numbers.shuffle(pairs)
        while pairs:
            part, pairs = pairs[: (size := numbers.randint(1, 16))], pairs[size:]
            batch = pack(
                [r.prompt_ids + c.token_ids for r, c in part],
                [len(r.prompt_ids) for r, _ in part],
                device="cuda",
            )
            temperatures = torch.tensor(
                [r.sampling.temperature for r, c in part for _ in c.token_ids], device="cuda"
            )
            logprobs, _ = forward_scores(weights.compute, batch, temperatures)
            sampled = torch.tensor([value for _, c in part for value in c.logprobs], device="cuda")
            tokens += len(sampled)
            equal += int((sampled == logprobs).sum())
            signs = torch.tensor(
                [1.0 - 2 * (i % 2) for i, (_, c) in enumerate(part) for _ in c.token_ids], device="cuda"
            )
            (-(logprobs * signs).mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        weights.refresh()
        engine.load_weights(weights.master.state_dict().items(), version=step + 1)
        theirs, ours = engine.weight_fingerprints(), fingerprints(weights.compute)
        assert theirs == ours, "the engine holds other weights"
        if (step + 1) % 20 == 0:
            print(
                f"step {step + 1}: {equal:,} of {tokens:,} equal, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    print(
        f"{arguments.shape}: {arguments.steps} steps, {tokens:,} sampled tokens, {equal:,} bitwise equal, "
        f"{time.perf_counter() - start:.0f} s; sum of the masters {first:.4f} -> {total_of(weights.master):.4f}"
    )
    sys.exit(0 if equal == tokens else 1)


if __name__ == "__main__":
    main()
