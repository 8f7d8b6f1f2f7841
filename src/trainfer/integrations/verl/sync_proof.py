"""Fingerprints of the weights after every sync, on both sides: is what the rollout holds what the trainer sent?

Takes the trainer's model and vLLM's worker; gives two dumps of weights alone, ``OUT/weights/train`` and
``OUT/weights/rollout-R``, one version a sync. They are written for every step, captured or not.
"""

import pkgutil
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainfer.check.dump.records import Role, WeightRecord
from trainfer.check.dump.tensors import DTYPE_NAMES
from trainfer.check.probe.names import named_tensors
from trainfer.check.probe.settings import check_settings
from trainfer.check.probe.sink import CaptureWarning, TensorSink
from trainfer.check.probe.weights import part_fingerprint
from trainfer.integrations.verl.bare_dump import BareDump
from trainfer.integrations.verl.session import Session, session

_VLLM_WEIGHTS = "trainfer.integrations.vllm.weights:EffectiveWeights"
_VLLM_READER = "trainfer.engines.vllm.effective.pieces"


def train_weights(state: Session, model: nn.Module, dtype: str | None) -> None:
    """The actor's weights, as they are after this sync.

    Args:
        state: Of this process.
        model: The actor; of a sharded one this rank's parts are written.
        dtype: The rollout's, by verl's name (``bfloat16``): weights are rounded to it on their way, so they are here. None
            leaves them as they are.

    Raises:
        DumpError: the folder was used before.
        OSError: it cannot be written.
    """
    rank, size = _rank_and_size()
    dump = _dump("train", "train", rank, size, type(model).__name__)
    target = getattr(torch, dtype, None) if dtype else None
    names, first_names = named_tensors(model), dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, local = names[name]
        full_name = f"{module}.{local}" if module else local
        tied_to = first_names.get(id(parameter))
        first_names.setdefault(id(parameter), full_name)
        value = parameter.detach()
        if isinstance(target, torch.dtype) and value.is_floating_point():
            value = value.to(target)
        _, parts, text = part_fingerprint(value)
        record = WeightRecord(
            name=full_name,
            module=module,
            role=Role.PARAMETER,
            dtype=DTYPE_NAMES[value.dtype],
            shape=tuple(parameter.shape),
            fingerprint=text,
            weights_version=state.step,
            requires_grad=parameter.requires_grad,
            tied_to=tied_to,
            parts=parts,
        )
        dump.put(record, step=state.step, pass_name="weights")
    dump.mark()


def rollout_weights(state: Session, worker: Any, *, replica: int) -> None:
    """What one worker of vLLM computes with after this sync, under Transformers' names.

    Raises:
        DumpError: the folder was used before.
        OSError: it cannot be written.
    """
    rank, size = _rank_and_size()
    model = worker.model_runner.get_model()
    dump = _dump(f"rollout-{replica}", "rollout", rank, size, type(model).__name__)
    with torch.inference_mode(mode=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # the dump itself says what has no fingerprint
        weights = pkgutil.resolve_name(_VLLM_WEIGHTS)(
            model, dump.writer, _sink(dump), reader=_VLLM_READER, rank=rank, size=size
        )
        weights.write(step=state.step, version=state.step)
    dump.mark()


def _sink(dump: BareDump) -> TensorSink:
    settings = check_settings(
        side="rollout",
        pass_name=None,
        weights_version=None,
        level="L0",
        task="statistics",
        backward=False,
        modules=None,
        steps=None,
        ranks=None,
        token_range=None,
        prompts_only=False,
        weights="fingerprint",
        max_bytes=None,
    )
    return TensorSink(dump.writer, settings)


@cache
def _dump(name: str, side: str, rank: int, size: int, model_class: str) -> BareDump:
    settings = session().settings
    return BareDump(
        settings.folder / "weights" / name,
        side=side,
        run_id=settings.run_id,
        config={"verl": settings.verl, "attached": True},
        rank=rank,
        world_size=size,
        model_class=model_class,
    )


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
