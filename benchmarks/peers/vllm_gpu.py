"""vLLM on a CUDA device, answering timing questions from another process; started by hand or by ``against_vllm.py``.

    [VLLM_BATCH_INVARIANT=1] python benchmarks/peers/vllm_gpu.py MODEL_FOLDER EXCHANGE_FOLDER

Loads MODEL_FOLDER (in process, compiled, CUDA graphs, prefix cache off), warms up, writes ``ready.json`` and then answers
each ``ask-N.json`` ({"sequences": 64, "prompt": 128, "new": 512}) with ``answer-N.json`` ({"seconds": 1.7}), until
``stop`` is there. Sampling: temperature 1, the sampled token's log-prob, no stop token, no detokenising.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_HOST_IP="127.0.0.1",
    NCCL_SOCKET_IFNAME="lo",
    GLOO_SOCKET_IFNAME="lo",
)

import torch
import vllm

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64]


def start(model_folder: str) -> vllm.LLM:
    return vllm.LLM(
        model=model_folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        gpu_memory_utilization=0.2,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        seed=0,
        compilation_config={"cudagraph_capture_sizes": CAPTURE_SIZES},
    )


def seconds(llm: vllm.LLM, sequences: int, prompt: int, new: int) -> float:
    numbers = random.Random(prompt)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(5, 32000) for _ in range(prompt)]} for _ in range(sequences)
    ]
    params = vllm.SamplingParams(
        max_tokens=new, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
    )
    torch.cuda.synchronize()
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    model_folder, exchange = sys.argv[1], Path(sys.argv[2])
    exchange.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    llm = start(model_folder)
    for sequences in (64, 8):
        seconds(llm, sequences, 128, 16)
    facts = {
        "vllm": vllm.__version__,
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        "start_s": round(time.perf_counter() - begun, 1),
    }
    (exchange / "ready.json").write_text(json.dumps(facts))
    number = 0
    while not (exchange / "stop").exists():
        ask = exchange / f"ask-{number}.json"
        if not ask.exists():
            time.sleep(0.05)
            continue
        took = seconds(llm, **json.loads(ask.read_text()))
        unfinished = exchange / "answer.part"
        unfinished.write_text(json.dumps({"seconds": took}))
        unfinished.rename(exchange / f"answer-{number}.json")
        number += 1


if __name__ == "__main__":
    main()
