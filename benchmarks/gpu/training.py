"""A training step on a CUDA device: ours against plain Transformers, and what the checks of a step cost.

    python benchmarks/gpu/training.py [--sequences 8] [--length 1024] [--rounds 7]

Random model in the shape of Qwen3-0.6B (vocabulary 32,000, bf16 parameters), log-prob loss over all tokens, fused AdamW,
turn by turn in one process. "Stock" is Transformers as it comes: eager norms, SDPA, logits of all rows, log_softmax in
float32. Prints milliseconds (medians), tokens/s, MFU at 790 TFLOP/s, peak memory, and the always-on tier: weight
fingerprints of both sides and the agreement metrics.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from shapes import PEAK_FLOPS, VOCABULARY, matmul_parameters, qwen3_06b
from torch import Tensor, nn

from trainfer.engines.module_weights import fingerprints
from trainfer.exact.packed import pack
from trainfer.exact.scores import forward_scores


def stock_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, 1:, None])[..., 0].flatten()


def our_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    batch = pack(ids.tolist(), [1] * len(ids), device="cuda")
    return forward_scores(model, batch, torch.ones(batch.num_scored, device="cuda"))[0]


def milliseconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    numbers = random.Random(0)
    rows = [
        [numbers.randrange(VOCABULARY) for _ in range(arguments.length)] for _ in range(arguments.sequences)
    ]
    ids = torch.tensor(rows, device="cuda")
    weights = torch.randn(ids.numel() - len(ids), device="cuda")
    sides = {"stock": (qwen3_06b(attention="sdpa"), stock_logprobs), "ours": (qwen3_06b(), our_logprobs)}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True) for name, (model, _) in sides.items()
    }
    forward: dict[str, list[float]] = {name: [] for name in sides}
    step: dict[str, list[float]] = {name: [] for name in sides}
    peak: dict[str, float] = {}

    def one_forward(name: str) -> None:
        model, logprobs = sides[name]
        with torch.no_grad():
            logprobs(model, ids)

    def one_step(name: str) -> None:
        model, logprobs = sides[name]
        (logprobs(model, ids) @ weights).backward()
        optimizers[name].step()
        optimizers[name].zero_grad(set_to_none=True)

    for turn in range(arguments.rounds + 2):
        for name in sides:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times = (
                milliseconds(lambda name=name: one_forward(name)),
                milliseconds(lambda name=name: one_step(name)),
            )
            peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            if turn > 1:
                forward[name].append(times[0])
                step[name].append(times[1])
    model = sides["ours"][0]
    flops = 6 * matmul_parameters(model) * ids.numel() + 6 * 28 * 16 * 128 * arguments.length * ids.numel()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.sequences} x {arguments.length} tokens"
    )
    for name in sides:
        ms = statistics.median(step[name])
        print(
            f"{name:6} forward {statistics.median(forward[name]):6.1f} ms, step {ms:6.1f} ms (best {min(step[name]):.1f}), "
            f"{ids.numel() / ms * 1000:8,.0f} tokens/s, MFU {flops / (ms / 1000) / PEAK_FLOPS:.1%}, "
            f"{peak[name]:.1f} GiB above weights and optimizer"
        )
    for what, values in (("forward", forward), ("step", step)):
        ratio = statistics.median(a / b for a, b in zip(values["ours"], values["stock"], strict=True))
        print(f"ours / stock, {what}: {ratio:.2f}")
    with torch.no_grad():
        theirs, ours = stock_logprobs(sides["stock"][0], ids), our_logprobs(model, ids)
    gap = (theirs - ours).abs()
    print(f"log-probs, stock against ours: mean {gap.mean():.4f}, max {gap.max():.4f} (bf16 noise)")
    fingerprints(model)
    cost = statistics.median(milliseconds(lambda: fingerprints(model)) for _ in range(5))
    print(
        f"fingerprints of all weights, one side: {cost:.1f} ms ({matmul_parameters(model) / 1e6:.0f} M parameters)"
    )


if __name__ == "__main__":
    main()
