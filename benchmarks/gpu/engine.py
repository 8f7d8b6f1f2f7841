"""Builtin engine on a CUDA device: exact against ordinary against HF generate, and the decode step.

    python benchmarks/gpu/engine.py [--sequences 64] [--prompt 128] [--new 512] [--rounds 3] [--skip-hf]

Random model in the shape of Qwen3-0.6B (vocabulary 32,000, bf16), all in one process, turn by turn. "Ordinary" is the
same engine without the GEMM rule: the library's product everywhere. Prints tokens/s and ratios; for the decode step
at a context of about 1000 the milliseconds, the share of the bytes floor (weights and keys read once at the measured
copy bandwidth) and the model FLOP utilisation at 790 TFLOP/s.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from shapes import PEAK_FLOPS, copy_bandwidth, matmul_parameters, qwen3_06b, requests_of

from trainfer.engines.builtin.gpu_engine import GpuEngine
from trainfer.engines.builtin.gpu_graphs import BURST, Burst
from trainfer.engines.limits import EngineLimits
from trainfer.exact.gpu_linear import ROUTES
from trainfer.exact.linear import RoutedLinear
from trainfer.exact.logprobs import row_sampling
from trainfer.train.rollout.engine import Engine
from trainfer.types import SamplingParams


def unrouted(model: nn.Module) -> nn.Module:
    """The same model with the library's product everywhere."""
    for module in model.modules():
        if isinstance(module, RoutedLinear):
            module.__class__ = nn.Linear
    return model


def timed(engine: Engine, requests: list) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(requests)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def decode_ms(engine: GpuEngine, sequences: int, context: int) -> float:
    """Device milliseconds of a decode step around ``context``, draw and log-probs included, host work not."""
    pages = -(-(context + BURST) // 64)
    engine.generate(requests_of(sequences, prompt=context, new=2))  # makes cache and graphs
    assert engine.graphs is not None
    params = [SamplingParams(max_new_tokens=BURST)] * sequences
    burst = Burst(
        input_ids=[1] * sequences,
        positions=[context - BURST // 2] * sequences,
        blocks=[range(1 + slot * pages, 1 + (slot + 1) * pages) for slot in range(sequences)],
        uniforms=numpy.full((BURST, sequences), 0.5),
        sampling=row_sampling(params, [1] * sequences, device="cpu"),
    )
    return engine.graphs.device_milliseconds(burst, 15)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-hf", action="store_true")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=16384)
    engines = {
        "exact": GpuEngine(qwen3_06b(), limits=limits),
        "ordinary": GpuEngine(unrouted(qwen3_06b()), limits=limits),
    }
    requests = requests_of(arguments.sequences, prompt=arguments.prompt, new=arguments.new)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for name, engine in engines.items():
        start = time.perf_counter()
        timed(engine, requests)
        print(f"{name}: first call {time.perf_counter() - start:.1f} s, {type(engine.program).__name__}")
    for shape, route in ROUTES.items():
        print(
            f"  {shape.inner}x{shape.outputs}: tile {route.tile}, to {route.rows_to} rows, us {route.microseconds}"
        )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            seconds[name].append(timed(engine, requests))
    tokens = arguments.sequences * arguments.new
    for name, values in seconds.items():
        best = statistics.median(values)
        print(
            f"{name:9} {tokens / best:9,.0f} tokens/s ({arguments.sequences} x ({arguments.prompt} + {arguments.new})), {best:.2f} s"
        )
    print(
        f"exact / ordinary: {statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)):.3f} of the time"
    )
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (both engines)")
    model = qwen3_06b()
    parameters = matmul_parameters(model)
    for sequences in (64, 8):
        results = {
            name: statistics.median(decode_ms(engine, sequences, 1000) for _ in range(arguments.rounds))
            for name, engine in engines.items()
        }
        kv_bytes = sequences * 1000 * 28 * 2 * 8 * 128 * 2
        floor = (parameters * 2 + kv_bytes) / bandwidth * 1000
        flops = 2 * parameters * sequences + 4 * sequences * 1000 * 28 * 16 * 128
        for name, ms in results.items():
            print(
                f"decode, batch {sequences}, context 1000, {name:9}: {ms:.3f} ms; floor {floor:.2f} ms ({floor / ms:.0%}), "
                f"MFU {flops / (ms / 1000) / PEAK_FLOPS:.1%}"
            )
        print(f"  exact / ordinary {results['exact'] / results['ordinary']:.3f}")
    if not arguments.skip_hf:
        hf_generate(model, arguments, statistics.median(seconds["exact"]))


def hf_generate(model: nn.Module, arguments: argparse.Namespace, ours: float) -> None:
    """Transformers' generate, dynamic cache, sdpa, at fewer new tokens (its step time hardly grows)."""
    model.set_attn_implementation("sdpa")
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    ids = torch.tensor(
        [r.prompt_ids for r in requests_of(arguments.sequences, prompt=arguments.prompt, new=1)]
    ).cuda()
    times = []
    for new in (8, arguments.new):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new
            )
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    rate = arguments.sequences * arguments.new / times[-1]
    print(f"HF generate {rate:,.0f} tokens/s; builtin exact is {times[-1] / ours:.1f} times as fast")


if __name__ == "__main__":
    main()
