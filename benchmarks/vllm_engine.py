"""vLLM as trainfer's engine: tokens a second beside the builtin engine, and what a sync with its proof costs.

    OMP_NUM_THREADS=1 python benchmarks/vllm_engine.py [--rounds 5] [--prompts 8] [--group 4] [--new 64]

Needs vLLM (make setup-vllm). Both engines sample the same requests from the same random 3.7 M model (Qwen3-shaped:
hidden 256, 4 layers, 4/2 heads of 64, MLP 768, vocabulary 1024, float32), turn by turn in one process, so that
what else the machine does hits both; CPU seconds of this process, medians over the rounds, the ratio the median of
the paired ratios. A sync sends all weights, drops the prefix cache and compares the fingerprints of all tensors.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from trainfer.engines.registry import make_engine
from trainfer.engines.vllm.environment import installed_version
from trainfer.engines.vllm.settings import VllmSettings
from trainfer.errors import EngineError
from trainfer.integrations.transformers.load import load_model, save_model, tiny_model
from trainfer.train.rollout.engine import Engine
from trainfer.types import GenerationRequest, SamplingParams
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.weights import sync_weights

VOCAB_SIZE = 1024


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


def cpu_seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(engines: dict[str, Engine], requests: list[GenerationRequest], rounds: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.generate(requests)
    for _ in range(rounds):
        for name, engine in engines.items():
            seconds[name].append(cpu_seconds(lambda engine=engine: engine.generate(requests)))
    tokens = len(requests) * requests[0].sampling.max_new_tokens
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:8} {median:.3f} CPU s   {tokens / median:,.0f} tokens per CPU second")
    ratios = [ours / theirs for ours, theirs in zip(seconds["builtin"], seconds["vllm"], strict=True)]
    print(
        f"builtin / vllm, CPU time: {statistics.median(ratios):.2f} (range {min(ratios):.2f} to {max(ratios):.2f})"
    )


def time_sync(engine: Engine, folder: Path, rounds: int) -> None:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    whole = [
        cpu_seconds(
            lambda version=version: sync_weights(
                model, RolloutWorker(engine), version=version, dtype=torch.float32
            )
        )
        for version in range(rounds + 1)
    ][1:]
    proof = [cpu_seconds(engine.weight_fingerprints) for _ in range(rounds)]
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"sync of {size:.1f} M parameters: {1000 * statistics.median(whole):.0f} CPU ms, of which vLLM's side of the proof "
        f"{1000 * statistics.median(proof):.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="new tokens a sequence")
    arguments = parser.parse_args()
    try:
        installed_version()
    except EngineError as error:
        print(f"skipped: {error}")
        return
    torch.set_num_threads(1)
    model = tiny_model(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=768,
    )
    requests = make_requests(arguments.prompts, arguments.group, arguments.new)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(model, folder)
        vllm = VllmSettings(model_folder=folder, dtype="float32", device="cpu", max_sequence_tokens=512)
        start = time.perf_counter()
        engine = make_engine("vllm", vllm=vllm)
        print(
            f"vLLM's import and start: {time.perf_counter() - start:.1f} s (wall), its log-prob check included"
        )
        compare({"builtin": make_engine("builtin", model=model), "vllm": engine}, requests, arguments.rounds)
        time_sync(engine, folder, arguments.rounds)
        engine.close()


if __name__ == "__main__":
    main()
