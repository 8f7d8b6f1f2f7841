"""Training steps under FSDP2 on one or several CUDA devices: ours against plain Transformers with FSDP2.

    torchrun --standalone --nproc-per-node 1 benchmarks/gpu/fsdp_training.py --json /tmp/one.json
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/fsdp_training.py --json /tmp/two.json --against /tmp/one.json
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/fsdp_training.py --sequence-parallel 2

Random model in the shape of Qwen3-0.6B (vocabulary 32,000): float32 masters, bf16 compute, float32 reduction, a shard group per
layer, gradient clipping, fused AdamW, ``--sequences`` x ``--length`` tokens a rank, every token scored. Ours is the trainer of a
run (``train.update.trainer``), packed, exact; plain is the module as it comes: SDPA, logits of all rows, log_softmax in float32.
Turn by turn in one run; prints milliseconds (medians of the slowest rank), tokens/s over all ranks, peak memory of a rank, and with
``--against`` the scaling. ``--tiny`` runs the same on CPU ranks (gloo), to see that it runs.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.linear import route_linears
from trainfer.exact.routed import route_modules
from trainfer.integrations.transformers.register import register_attention
from trainfer.integrations.transformers.structure import decoder_layers
from trainfer.train.update.aggregate import LossAggregation, MiniBatchTotals
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.logprob import ForwardLimit
from trainfer.train.update.loss import LossSettings
from trainfer.train.update.schedule import LearningRate
from trainfer.train.update.sharded import ShardedWeights, Sharding
from trainfer.train.update.trainer import Trainer, TrainerSettings
from trainfer.types import TrainingSequence
from trainfer.workers.mesh import Meshes, make_meshes

BIG = {
    "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 4096,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip


def make_model(attention: str, *, tiny: bool) -> PreTrainedModel:
    """Equal on every rank, in host memory, float32."""
    register_attention()
    torch.manual_seed(0)
    config = Qwen3Config(**(TINY if tiny else BIG), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    if attention == ATTENTION_NAME:
        route_linears(model)
        route_modules(model)
    return model.train()


class Ours:
    """The trainer of a run."""

    def __init__(self, meshes: Meshes, rows: list[list[int]], device: torch.device, *, tiny: bool) -> None:
        model = make_model(ATTENTION_NAME, tiny=tiny)
        sharding = Sharding(
            mesh=meshes.fsdp,
            compute_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            reshard_after_forward=False,
        )
        weights = ShardedWeights(model, decoder_layers(model), sharding)
        settings = TrainerSettings(
            loss=LossSettings(),
            aggregation=LossAggregation.TOKEN_MEAN,
            horizon=len(rows[0]),
            limit=ForwardLimit(sequences=len(rows)),
            learning_rate=LearningRate(peak=1e-6),
        )
        self._trainer = Trainer(weights, settings, device=device, shard=meshes.sequence)
        sequences = tuple(
            TrainingSequence(
                token_ids=tuple(ids),
                prompt_length=1,
                temperature=1.0,
                old_logprobs=None,
                ref_logprobs=None,
                advantages=(1.0 - 2 * (index % 2),) * (len(ids) - 1),
                loss_mask=(True,) * (len(ids) - 1),
            )
            for index, ids in enumerate(rows)
        )
        shared = 1 if meshes.sequence is None else meshes.sequence.size
        holders = dist.get_world_size() // shared
        totals = MiniBatchTotals(
            tokens=holders * sum(len(ids) - 1 for ids in rows), sequences=holders * len(rows)
        )
        self._batch = MiniBatch(sequences=sequences, totals=totals)

    def step(self) -> None:
        self._trainer.update([self._batch])


class Plain:
    """Transformers and FSDP2 as they come."""

    def __init__(self, meshes: Meshes, rows: list[list[int]], device: torch.device, *, tiny: bool) -> None:
        self._model: nn.Module = make_model("sdpa", tiny=tiny)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*decoder_layers(self._model), self._model):
            fully_shard(module, mesh=meshes.fsdp, mp_policy=policy, reshard_after_forward=False)
        cuda = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=cuda)
        self._ids = torch.tensor(rows, device=device)
        self._signs = torch.tensor([[1.0 - 2 * (i % 2)] for i in range(len(rows))], device=device)

    def step(self) -> None:
        logits: Tensor = self._model(input_ids=self._ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(2, self._ids[:, 1:, None])[..., 0]
        (-(logprobs * self._signs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def slowest_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Of all ranks, from a common start."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    ranks = dist.get_world_size()
    meshes = make_meshes(
        device.type,
        num_ranks=ranks,
        fsdp_size=-1,
        sequence_parallel_size=arguments.sequence_parallel,
    )
    holder = dist.get_rank() // arguments.sequence_parallel
    numbers = random.Random(holder)
    vocabulary = (TINY if arguments.tiny else BIG)["vocab_size"]
    sequences = arguments.sequences * arguments.sequence_parallel
    rows = [[numbers.randrange(vocabulary) for _ in range(arguments.length)] for _ in range(sequences)]
    sides = {"ours": Ours(meshes, rows, device, tiny=arguments.tiny)}
    if arguments.sequence_parallel == 1:
        sides["plain"] = Plain(meshes, rows, device, tiny=arguments.tiny)
    times: dict[str, list[float]] = {name: [] for name in sides}
    peak: dict[str, float] = dict.fromkeys(sides, 0.0)
    for turn in range(arguments.rounds + 2):
        for name, side in sides.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = slowest_seconds(side.step, device)
            if device.type == "cuda":
                peak[name] = torch.cuda.max_memory_allocated() / 2**30
            if turn > 1:
                times[name].append(took)
    tokens = arguments.sequences * arguments.length * ranks
    return {
        name: {
            "ms": statistics.median(values) * 1000,
            "tokens_per_s": tokens / statistics.median(values),
            "peak_gib": peak[name],
        }
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8, help="a rank")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequence-parallel", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", local)
    if arguments.tiny:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    results = measure(arguments, device)
    if dist.get_rank() == 0:
        say(results, arguments)
    dist.destroy_process_group()


def say(results: dict[str, dict[str, float]], arguments: argparse.Namespace) -> None:
    ranks = dist.get_world_size()
    print(
        f"{ranks} ranks, {arguments.sequences} x {arguments.length} tokens a rank, sequence parallel {arguments.sequence_parallel}"
    )
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    for name, row in results.items():
        scaling = f", {row['tokens_per_s'] / before[name]['tokens_per_s']:.2f} x" if name in before else ""
        print(
            f"{name:6} {row['ms']:8.1f} ms, {row['tokens_per_s']:9,.0f} tokens/s{scaling}, {row['peak_gib']:.1f} GiB a rank (both sides loaded)"
        )
    if "plain" in results:
        print(f"ours / plain: {results['ours']['ms'] / results['plain']['ms']:.2f} of the time")
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
