"""Ranks as Ray actors: one process per rank, on this machine or on every node of a cluster.

Takes a ``RankSetup``; starts or joins Ray, places the ranks, builds them, and gives a ``Transport``. This is the only
module that imports Ray. Each actor takes one CPU and, where the run is on GPUs, one GPU; the ranks of a node are placed
together, nodes are apart. A rank's output goes to ``RUN/logs/rank_R.log``.

A rank that ends, or that does not answer after another one has failed, ends the run: a collective that lost a member
cannot be repaired, the checkpoint is the way back.
"""

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainfer.config.schema import RayInitConfig
from trainfer.errors import TrainferError, WorkerError
from trainfer.plan.records import StepPlan
from trainfer.workers.failures import how_to_go_on, rank_log, send_output_to, worker_lost
from trainfer.workers.rank import Answer_co, Command, Place, RankSetup, RankWorker, join

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 300
"""Longest wait for a cluster to have room for all ranks."""
GRACE_SECONDS = 60
"""After a rank has failed, how long the others may take to come out of what they are doing."""
OBJECT_STORE_BYTES = 256 << 20
"""Of a Ray that is started here: commands and answers are small, weights never pass through it."""
LOOPBACK = "127.0.0.1"


class RankActor:
    """A worker process; nothing is built before ``build``, so that the process can be met first."""

    def __init__(self, rank: int, num_ranks: int, log: Path) -> None:
        send_output_to(log)
        self._rank = rank
        self._num_ranks = num_ranks
        self._worker: RankWorker | None = None

    def meeting_point(self, *, one_node: bool) -> str:
        """An address of this process that is free now, for the process group."""
        host = LOOPBACK if one_node else ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def build(self, setup: RankSetup, meeting: str) -> None:
        """Join the others and load the models."""
        place = Place(rank=self._rank, num_ranks=self._num_ranks, local_device=0, meeting=meeting)
        join(place, setup.device_type)
        self._worker = RankWorker(setup, place)

    def run(self, command: Command[Answer_co]) -> Answer_co:
        """Do it."""
        assert self._worker is not None, "a rank is built first"
        return command.run(self._worker)

    def close(self) -> None:
        """Leave the process group."""
        if self._worker is not None:
            self._worker.close()


class RayTransport:
    """See the module docstring."""

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        group: PlacementGroup,
        run_folder: Path,
        *,
        owns_ray: bool,
    ) -> None:
        """``owns_ray``: Ray was started for this run and ends with it."""
        self._actors = list(actors)
        self._group = group
        self._run_folder = run_folder
        self._owns_ray = owns_ray

    def build(self, setup: RankSetup, *, one_node: bool) -> None:
        """Let all ranks meet and load.

        Raises:
            TrainferError: what a rank raised.
        """
        (meeting,) = self._wait_for([self._actors[0].meeting_point.remote(one_node=one_node)])
        self._wait_for([actor.build.remote(setup, meeting) for actor in self._actors])

    def call(self, commands: Sequence[Command[Answer_co]]) -> list[Answer_co]:
        """Give command r to rank r; see ``Transport``."""
        pairs = zip(self._actors, commands, strict=True)
        return self._wait_for([actor.run.remote(command) for actor, command in pairs])

    def _wait_for(self, answers: "list[ray.ObjectRef]") -> list:
        """All answers; on a failure its error, once the other ranks are out of the command or ended."""
        waiting = list(answers)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done)
            except RayError as error:
                raise self._failure(answers, done, error, waiting) from error
        return ray.get(answers)

    def _failure(
        self,
        answers: "list[ray.ObjectRef]",
        failed: "ray.ObjectRef",
        error: RayError,
        waiting: "list[ray.ObjectRef]",
    ) -> TrainferError:
        """What to raise. Where a rank is gone, the others fail on their lost connection: it alone is the cause."""
        if isinstance(error, RayTaskError):
            others, stuck = (
                ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_SECONDS) if waiting else ([], [])
            )
            if isinstance(error.cause, TrainferError):
                if stuck:
                    self._end()
                return error.cause
            for other in others:
                lost = _actor_error(other)
                if lost is not None:
                    failed, error = other, lost
        self._end()
        rank = answers.index(failed)
        if isinstance(error, RayTaskError):
            return WorkerError(f"rank {rank} failed.\n{error}\n{how_to_go_on(self._run_folder)}")
        return worker_lost(self._run_folder, rank, _first_line(error))

    def close(self) -> None:
        """End every rank."""
        if not self._actors:
            return
        _, stuck = ray.wait(
            [actor.close.remote() for actor in self._actors],
            num_returns=len(self._actors),
            timeout=GRACE_SECONDS,
        )
        if stuck:
            logger.warning("%d worker(s) did not end by themselves and are stopped.", len(stuck))
        self._end()

    def _end(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if actors:
            remove_placement_group(self._group)
            if self._owns_ray:
                ray.shutdown()


def start_ray(setup: RankSetup, run_folder: Path) -> RayTransport:
    """Start or join Ray and build every rank.

    Raises:
        WorkerError: Ray cannot be reached, or the cluster has no room for the ranks.
        TrainferError: what a rank raised while it was built.
    """
    trainer, plan = setup.config.trainer, setup.plan
    options = setup.config.ray_kwargs.ray_init
    owns_ray = not ray.is_initialized()
    if owns_ray:
        _init(options, plan)
    one_node = trainer.nnodes == 1
    group = _place(setup)
    try:
        actors = [
            cast(
                ActorHandle,
                ray.remote(RankActor)
                .options(
                    num_cpus=1,
                    num_gpus=1 if setup.device_type == "cuda" else 0,
                    runtime_env={"env_vars": _environment(options, one_node=one_node)},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, rank // trainer.n_gpus_per_node
                    ),
                )
                .remote(rank, plan.num_ranks, rank_log(run_folder, rank)),
            )
            for rank in range(plan.num_ranks)
        ]
    except RayError as error:
        raise WorkerError(f"Ray cannot start the workers: {_first_line(error)}") from error
    transport = RayTransport(actors, group, run_folder, owns_ray=owns_ray)
    try:
        transport.build(setup, one_node=one_node)
    except TrainferError:
        transport._end()
        raise
    return transport


def _init(options: RayInitConfig, plan: StepPlan) -> None:
    address = options.address or os.environ.get("RAY_ADDRESS")
    try:
        if address is not None:
            ray.init(
                address=address, log_to_driver=False, runtime_env={"env_vars": options.runtime_env.env_vars}
            )
            return
        # Its own machine's cluster needs no token, and a token would be written to the home folder.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=options.num_cpus or max(os.cpu_count() or 1, plan.num_ranks),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=LOOPBACK,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        where = (
            f"the cluster {address} cannot be reached" if address else "Ray cannot be started on this machine"
        )
        raise WorkerError(
            f"{where}: {_first_line(error)}. Check ray_kwargs.ray_init.address, or start the run with torchrun."
        ) from error


def _environment(options: RayInitConfig, *, one_node: bool) -> dict[str, str]:
    """Variables of a worker: the driver's numerical ones, then the configuration's."""
    passed = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ}
    passed.setdefault("OMP_NUM_THREADS", "1")
    if one_node:
        passed["GLOO_SOCKET_IFNAME"] = "lo"
    return passed | options.runtime_env.env_vars


def _place(setup: RankSetup) -> PlacementGroup:
    """A bundle per node with room for its ranks."""
    trainer = setup.config.trainer
    per_node, kind = trainer.n_gpus_per_node, "GPU" if setup.device_type == "cuda" else "CPU"
    bundle = {name: float(per_node) for name in {"CPU", kind}}
    strategy = "STRICT_SPREAD" if trainer.nnodes > 1 else "STRICT_PACK"
    group = placement_group([bundle] * trainer.nnodes, strategy=strategy)
    if not group.wait(_placement_seconds(bundle, trainer.nnodes)):
        remove_placement_group(group)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise WorkerError(
            f"the Ray cluster has no room for trainer.nnodes={trainer.nnodes} node(s) with {per_node} {kind}s and {per_node} "
            f"CPUs each; its nodes have {has}. Add nodes, lower trainer.n_gpus_per_node or trainer.nnodes, or raise "
            "ray_kwargs.ray_init.num_cpus."
        )
    return group


def _placement_seconds(bundle: dict[str, float], nodes: int) -> int:
    """Short where the cluster, as it is, can never have the room; it may still grow."""
    able = sum(
        all(node["Resources"].get(name, 0) >= count for name, count in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    )
    return PLACEMENT_SECONDS if able >= nodes else 10


def _actor_error(answer: "ray.ObjectRef") -> RayActorError | None:
    try:
        ray.get(answer)
    except RayActorError as error:
        return error
    except RayError:
        return None
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
