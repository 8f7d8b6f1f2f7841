"""A CPU platform for verl 0.9.1: select it with ``VERL_PLATFORM=cpu``, and ``VERL_ENGINE_DEVICE=cuda`` for its engines.

Ray is told of invented GPUs (``++ray_kwargs.ray_init.num_gpus=1``), which only number the workers. Three things that
need a patch of torch: functions that ``torch.cpu`` lacks, a process group's doubled backend, pinned memory.
"""

import contextlib

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_cpu_help.faults import plant_in_trainer


def _nothing(*_args, **_kwargs):
    return 0


for _name in (
    "empty_cache",
    "ipc_collect",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
):
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _nothing)
for _name, _function in {
    "get_device_name": lambda *_: "cpu",
    "mem_get_info": lambda *_: (2**33, 2**34),
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
}.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _function)

_init_process_group = torch.distributed.init_process_group


def _with_one_backend(backend=None, *args, **kwargs):
    """verl names gloo for the CPU and gloo for the device, and here they are one."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _with_one_backend
if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: torch.cpu)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return (None, None)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, message):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def ray_resource_options(self, count):
        return {"num_gpus": count}

    def is_ipc_supported(self):
        return False

    def rollout_env_vars(self):
        return {}

    def get_collective_module(self):
        return None

    def cudart(self):
        return None

    def get_device_uuid(self, index):
        return "cpu0"


plant_in_trainer()
