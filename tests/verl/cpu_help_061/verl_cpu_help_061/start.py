"""What stock verl 0.6.1 needs to start on a CPU; ``VERL_USE_EXTERNAL_MODULES=verl_cpu_help_061.start`` loads it.

It finds the device "cpu" by itself. What is missing: functions that ``torch.cpu`` lacks, process groups that ask for NCCL, two
collectives that gloo refuses, pinned memory, and the branch for a CPU in its packing of rows. ``VERL_CPU_FAULT`` plants a fault.
"""

import torch
import torch.distributed as dist


def _nothing(*_args, **_kwargs):
    return 0


_MISSING = {
    **dict.fromkeys(
        (
            "empty_cache",
            "ipc_collect",
            "manual_seed_all",
            "max_memory_allocated",
            "max_memory_reserved",
            "memory_allocated",
            "memory_reserved",
            "reset_peak_memory_stats",
            "set_device",
        ),
        _nothing,
    ),
    "get_device_name": lambda *_: "cpu",
    "get_rng_state": torch.get_rng_state,
    "manual_seed": torch.manual_seed,
    "mem_get_info": lambda *_: (2**33, 2**34),
    "set_rng_state": torch.set_rng_state,
}
for _name, _function in _MISSING.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _function)

_init_process_group, _all_gather, _all_reduce = dist.init_process_group, dist.all_gather, dist.all_reduce


def _with_gloo(backend=None, *args, **kwargs):
    """verl asks for gloo on the CPU and NCCL on the device, and here they are one."""
    one = backend in ("cpu:gloo,cpu:nccl", "cpu:gloo,cpu:gloo")
    return _init_process_group("gloo" if one else backend, *args, **kwargs)


def _gather_scalars(tensors, tensor, *args, **kwargs):
    """A tensor without dimensions into tensors of one element: NCCL takes it, gloo does not."""
    if tensor.dim() == 0 and tensors[0].dim() == 1:
        tensor = tensor.reshape(1)
    return _all_gather(tensors, tensor, *args, **kwargs)


def _mean_by_sum(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """gloo has no mean."""
    if op == dist.ReduceOp.AVG and not async_op:
        _all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        tensor.div_(dist.get_world_size(group))
        return None
    return _all_reduce(tensor, op=op, group=group, async_op=async_op)


dist.init_process_group, dist.all_gather, dist.all_reduce = _with_gloo, _gather_scalars, _mean_by_sum
torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self


def _pack_with_torch():
    from verl.utils.npu_utils import index_first_axis, pad_input, rearrange, unpad_input

    return index_first_axis, pad_input, rearrange, unpad_input


import verl.utils.attention_utils  # noqa: E402 (torch is ready now)

verl.utils.attention_utils._get_attention_functions = _pack_with_torch
