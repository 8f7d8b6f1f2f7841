"""Settings -> a running vLLM; its errors become ``EngineError`` with a remedy.

Imports vLLM: ``environment.prepare_process`` must have run. Leaves out what the engine is used for.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed
from vllm import LLM  # pyright: ignore[reportMissingImports]

from trainfer.engines.vllm.environment import keeping_process_group, undisturbed
from trainfer.engines.vllm.self_check import check_logprobs
from trainfer.engines.vllm.settings import VllmSettings
from trainfer.errors import EngineError

EXTENSION = "trainfer.engines.vllm.worker_extension.WeightsExtension"

_MEMORY_WORDS = ("memory", "KV cache", "cache blocks", "OutOfMemory")


def llm_arguments(settings: VllmSettings) -> dict[str, Any]:
    """What ``vllm.LLM`` is called with.

    Log-probs are ``processed_logprobs``: of the distribution that is sampled. Eager on a CPU; on a GPU vLLM
    compiles and captures graphs, which stay valid when weights are reloaded in place.

    Raises:
        EngineError: Several ranks, each with an engine, and an engine of several shards.
    """
    if joins_process_group() and settings.tensor_parallel_size > 1:
        raise EngineError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={settings.tensor_parallel_size} with several ranks: each "
            "rank hosts an engine of its own and samples its share of the prompts; set it to 1"
        )
    on_cpu = settings.device == "cpu"
    return {
        "model": str(settings.model_folder),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "max_model_len": settings.max_sequence_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(
            settings.max_num_batched_tokens,
            settings.max_num_seqs,
            settings.max_sequence_tokens if on_cpu else 0,
        ),
        "enable_prefix_caching": settings.enable_prefix_caching,
        # On a CPU vLLM 0.32 dies of a request with a seed whose prompt comes in chunks: it sets the offset of the
        # request's generator, which CPU generators have not.
        "enable_chunked_prefill": settings.enable_chunked_prefill and not on_cpu,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": on_cpu,
        "enable_sleep_mode": settings.sleeps and not on_cpu,
        "worker_extension_cls": EXTENSION,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        **({"distributed_executor_backend": "external_launcher"} if joins_process_group() else {}),
    }


def joins_process_group() -> bool:
    """True where the trainer's ranks each host an engine: vLLM then makes its groups among them.

    All ranks must start their engines together.
    """
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _tell_rank() -> None:
    """In variables that torchrun sets and Ray does not; ``undisturbed`` takes them away again."""
    if joins_process_group():
        os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
        os.environ.setdefault("WORLD_SIZE", str(torch.distributed.get_world_size()))
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        os.environ.setdefault("LOCAL_RANK", str(device))


def start(arguments: dict[str, Any]) -> LLM:
    """A running engine that has shown what its log-probs mean.

    Raises:
        EngineError: vLLM refused the model or the settings, found too little memory, or reports log-probs of
            another distribution than it samples from.
    """
    owns_process_group = not torch.distributed.is_initialized()
    with undisturbed():
        _tell_rank()
        try:
            llm = LLM(**arguments)
        except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as error:
            raise EngineError(_explain(error, arguments)) from error
        try:
            check_logprobs(llm)
        except (
            ValueError,
            RuntimeError,
        ) as error:  # in the first forward: kernels that lack a head size, memory
            stop(llm, owns_process_group=owns_process_group)
            raise EngineError(_explain(error, arguments)) from error
        except EngineError:
            stop(llm, owns_process_group=owns_process_group)
            raise
    return llm


def stop(llm: LLM, *, owns_process_group: bool) -> None:
    """End the engine and its worker processes.

    vLLM's own shutdown ends the default process group, too; where that is the trainer's, it is kept.
    """
    with contextlib.nullcontext() if owns_process_group else keeping_process_group():
        llm.llm_engine.engine_core.shutdown()


def _explain(error: Exception, arguments: dict[str, Any]) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {' '.join(lines)[:400]}"
    if isinstance(error, torch.OutOfMemoryError) or any(word in reason for word in _MEMORY_WORDS):
        remedy = (
            f"lower actor_rollout_ref.rollout.max_num_seqs ({arguments['max_num_seqs']}) or the sequence length "
            f"({arguments['max_model_len']}), change rollout.gpu_memory_utilization "
            f"({arguments['gpu_memory_utilization']}) on a GPU, or VLLM_CPU_KVCACHE_SPACE (GiB) on a CPU"
        )
        return f"vLLM found too little memory ({reason}): {remedy}"
    return (
        f"vLLM cannot run {arguments['model']} ({reason}); if it does not know this architecture, use "
        "actor_rollout_ref.rollout.name=builtin"
    )
