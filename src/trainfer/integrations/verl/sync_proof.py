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

from trainfer.check.probe.settings import check_settings
from trainfer.check.probe.sink import CaptureWarning, TensorSink
from trainfer.check.probe.weights import WeightWatcher
from trainfer.integrations.verl.bare_dump import BareDump
from trainfer.integrations.verl.session import Session, session

_VLLM_WEIGHTS = "trainfer.integrations.vllm.weights:EffectiveWeights"
_VLLM_READER = "trainfer.engines.vllm.effective.pieces"


def train_weights(state: Session, model: nn.Module) -> None:
    """The actor's weights, as they are after this sync.

    Raises:
        DumpError: the folder was used before.
        OSError: it cannot be written.
    """
    rank, size = _rank_and_size()
    dump = _dump("train", "train", rank, size, type(model).__name__)
    WeightWatcher(model, dump.writer, _sink(dump, "train"), full=False).write(
        step=state.step, version=state.step
    )
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
            model, dump.writer, _sink(dump, "rollout"), reader=_VLLM_READER, rank=rank, size=size
        )
        weights.write(step=state.step, version=state.step)
    dump.mark()


def _sink(dump: BareDump, side: str) -> TensorSink:
    settings = check_settings(
        side=side,
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
