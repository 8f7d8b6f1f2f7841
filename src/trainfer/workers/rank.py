"""One rank of several: actor, rollout and, where needed, ref, all in one process (colocated), and what it can be told.

Takes commands from the one process that drives the run; gives an answer to each. Within a command ranks meet in
collectives, so the same kind of command goes to all of them at once. Who sends them, and how, is the transport's
business (``ray_group.py``, ``torchrun_group.py``).
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from trainfer.config.schema import TrainConfig
from trainfer.plan.records import StepPlan
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.trainer import UpdateResult
from trainfer.types import Completion, GenerationRequest, SampledSequence, TokenScores
from trainfer.workers.actor import ActorWorker
from trainfer.workers.build_rank import DTYPES, build_actor, build_ref, gets_merged_weights, load_engine
from trainfer.workers.group import SyncProof
from trainfer.workers.mesh import make_meshes
from trainfer.workers.ref import Ref
from trainfer.workers.rollout import NOT_HERE, RolloutWorker
from trainfer.workers.watching import CaptureOrder
from trainfer.workers.weights import send_weights

Answer_co = TypeVar("Answer_co", covariant=True)
MEETING_TIMEOUT = timedelta(minutes=30)
"""Longest that a rank waits for another one in a collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """What a rank is built from; equal on all ranks."""

    config: TrainConfig
    plan: StepPlan
    model_folder: Path
    """On a file system that every node sees under this name."""
    total_steps: int
    device_type: str
    """``cpu`` or ``cuda``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is and where rank 0 can be met."""

    rank: int
    num_ranks: int
    local_device: int
    """Index of its GPU among those that the process sees; of no meaning on the CPU."""
    meeting: str
    """``tcp://HOST:PORT``, or ``env://``."""

    def device(self, device_type: str) -> torch.device:
        """Where this rank computes."""
        return torch.device(device_type, self.local_device) if device_type == "cuda" else torch.device("cpu")


class RankWorker:
    """See the module docstring."""

    def __init__(self, setup: RankSetup, place: Place) -> None:
        """Load every role's model; returns when all ranks of the process group have (see ``join``).

        Raises:
            ModelError: the folder cannot be used, or its heads cannot be shared.
        """
        config, plan = setup.config, setup.plan
        device = place.device(setup.device_type)
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as many ranks as cores, each with all cores, would fight for them
        # Logits are a view of the head's product and are only ever sliced, never written into.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        sections = config.actor_rollout_ref
        meshes = make_meshes(
            device.type,
            num_ranks=place.num_ranks,
            fsdp_size=sections.actor.fsdp_config.fsdp_size,
            sequence_parallel_size=plan.sequence_parallel_size,
        )
        torch.manual_seed(config.trainfer.seed)
        self.rank = place.rank
        self.actor: ActorWorker = build_actor(
            config, plan, setup.model_folder, device, total_steps=setup.total_steps, meshes=meshes
        )
        self.ref: Ref | None = build_ref(
            config, plan, setup.model_folder, device, meshes=meshes, actor=self.actor
        )
        self.merged = self.actor.adapter if gets_merged_weights(config) else None
        self.rollout_dtype = DTYPES[sections.rollout.dtype]
        self.rollout = RolloutWorker(load_engine(config, setup.model_folder, device, self.rollout_dtype))
        dist.barrier()

    def close(self) -> None:
        """Free the engine and leave the process group."""
        self.rollout.close()
        dist.barrier()
        dist.destroy_process_group()


def join(place: Place, device_type: str) -> None:
    """Start the process group: gloo for CPU tensors, and NCCL for those on GPUs."""
    device = place.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=place.meeting,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=MEETING_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


class Command(Protocol[Answer_co]):
    """Something to do on a rank."""

    def run(self, worker: RankWorker) -> Answer_co:
        """Do it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Sample these requests; other ranks sample others."""

    requests: tuple[GenerationRequest, ...]

    def run(self, worker: RankWorker) -> list[Completion]:
        """One completion per request, in their order."""
        return worker.rollout.generate(self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score these sequences with the actor, or with the ref."""

    sequences: tuple[SampledSequence, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    with_ref: bool

    def run(self, worker: RankWorker) -> list[TokenScores]:
        """One per sequence, in their order."""
        if not self.with_ref:
            return worker.actor.old_logprobs(self.sequences, self.micro_batches)
        assert worker.ref is not None, "a ref is asked only where the configuration needs one"
        return worker.ref.ref_logprobs(self.sequences, self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """How far the actor has come."""

    updates: int
    weights_version: int

    @classmethod
    def of(cls, actor: ActorWorker) -> "Counters":
        """Now."""
        return cls(updates=actor.updates, weights_version=actor.weights_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Train: this rank's part of each optimizer step."""

    mini_batches: tuple[MiniBatch, ...]

    def run(self, worker: RankWorker) -> tuple[UpdateResult, Counters]:
        """What this rank saw of it; additive statistics are its own share."""
        result = worker.actor.update(self.mini_batches)
        return result, Counters.of(worker.actor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SendWeights:
    """Hand the actor's weights to this rank's engine."""

    def run(self, worker: RankWorker) -> SyncProof:
        """Whether this rank's engine has them."""
        with worker.actor.at_work():
            return send_weights(
                worker.actor.weights.master,
                worker.rollout,
                version=worker.actor.weights_version,
                dtype=worker.rollout_dtype,
                merged=worker.merged,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Capture what both sides compute from now on; None ends it."""

    order: CaptureOrder | None

    def run(self, worker: RankWorker) -> str | None:
        """Why the engine cannot be watched, where it cannot."""
        if self.order is not None and worker.rollout.module is None:
            return NOT_HERE
        worker.rollout.watch(self.order)
        worker.actor.watch(self.order)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Write this rank's part of a checkpoint."""

    folder: Path

    def run(self, worker: RankWorker) -> None:
        """See ``ActorWorker.save``."""
        worker.actor.save(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginSave:
    """Begin to write this rank's part of a checkpoint behind the training."""

    folder: Path

    def run(self, worker: RankWorker) -> None:
        """See ``ActorWorker.begin_save``."""
        worker.actor.begin_save(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveIsWritten:
    """Ask for the end of what ``BeginSave`` began."""

    wait: bool

    def run(self, worker: RankWorker) -> bool:
        """See ``ActorWorker.save_is_written``."""
        return worker.actor.save_is_written(wait=self.wait)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Restore this rank's part of a checkpoint that any number of ranks wrote."""

    folder: Path

    def run(self, worker: RankWorker) -> Counters:
        """How far the run had come."""
        worker.actor.load(self.folder)
        return Counters.of(worker.actor)


class Transport(Protocol):
    """Brings commands to ranks and answers back."""

    def call(self, commands: Sequence[Command[Answer_co]]) -> list[Answer_co]:
        """Give command r to rank r; the answers of all ranks.

        Raises:
            TrainferError: what a rank raised. WorkerError: a rank is gone; nothing can be called afterwards.
        """
        ...

    def close(self) -> None:
        """End every rank."""
        ...
