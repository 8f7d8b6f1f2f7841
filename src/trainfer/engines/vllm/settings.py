"""How one vLLM is started; plain values, no vLLM, no torch."""

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """What the engine is made from. Example: ``VllmSettings(model_folder=path, dtype="float32", device="cpu",
    max_sequence_tokens=512)``.
    """

    model_folder: Path
    """Local Hugging Face folder: config and the weights to start with. Its tokenizer is not read."""
    dtype: str
    """"float32" or "bfloat16"; of weights, activations and key-value cache."""
    device: str
    """"cpu" or "cuda": which build of vLLM must be installed."""
    max_sequence_tokens: int
    """Longest prompt plus response."""
    tensor_parallel_size: int = 1
    """Above 1 vLLM starts one worker process for each further shard."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for weights and cache; not used on a CPU, where VLLM_CPU_KVCACHE_SPACE counts."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    sleeps: bool = True
    """On a GPU: give memory back after each generation and take it again for the next weights or requests."""
    bucket_bytes: int = 512 * MIB
    """Weights handed over at a time; a decoder layer is never split, so one layer may be more."""
