"""Whether torchrun has started this process, and as which rank. Reads the environment; loads no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainfer.errors import ConfigError
from trainfer.plan.records import StepPlan

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """One process among those that torchrun has started."""

    rank: int
    num_ranks: int
    local_rank: int
    ranks_per_node: int
    host: str
    port: int
    """Of torchrun's store."""

    def check(self, plan: StepPlan) -> None:
        """The configuration must count the same processes.

        Raises:
            ConfigError: it does not.
        """
        if plan.num_ranks != self.num_ranks:
            raise ConfigError(
                f"torchrun has started {self.num_ranks} processes, but trainer.n_gpus_per_node x trainer.nnodes = "
                f"{plan.num_ranks}. Set trainer.n_gpus_per_node={self.ranks_per_node} and "
                f"trainer.nnodes={self.num_ranks // self.ranks_per_node}, or start as many processes."
            )


def launched_by_torchrun(environment: Mapping[str, str] | None = None) -> Launched | None:
    """None where this process was started on its own.

    Raises:
        ConfigError: torchrun's variables are there in part, or hold no numbers.
    """
    given = os.environ if environment is None else environment
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, as under torchrun, but not {', '.join(missing)}; start with torchrun, or unset "
            "RANK and WORLD_SIZE to run without it."
        )
    try:
        rank, num_ranks, local_rank, per_node = (int(given[name]) for name in _NAMES[:4])
        port = int(given["MASTER_PORT"])
    except ValueError as error:
        raise ConfigError(f"torchrun's variables {', '.join(_NAMES)} hold no numbers: {error}.") from error
    if not 0 < port < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT={port}: the ranks cannot meet at a port that nobody has chosen. Start torchrun with a free port "
            "(--master-port=29500), or on one machine with --standalone, which finds one."
        )
    return Launched(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        ranks_per_node=per_node,
        host=given["MASTER_ADDR"],
        port=port,
    )
