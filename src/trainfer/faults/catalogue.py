"""All faults and controls of the suite, the cases of a seed, and what cannot be made here.

Takes seeds and a filter; gives cases. A case's side, model, dtype and layer are drawn from the fault's name and the seed,
its magnitude walks through the fault's list.
"""

import random
from collections.abc import Mapping

from trainfer.errors import ConfigError
from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS
from trainfer.faults.plants import (
    attention,
    execution,
    head,
    kv_cache,
    logprob,
    norm,
    rope,
    stacks,
    tokens,
    weights,
)
from trainfer.faults.records import Case, family

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for module in (tokens, weights, rope, attention, norm, head, kv_cache, execution, logprob, stacks)
    for fault in module.FAULTS
}

EMULATED: Mapping[str, str] = {
    "shape.parallel": "no ranks: one process adds up the partial sums that four tensor-parallel ranks would hold",
    "shape.batch": "no GPU kernel that splits sums by batch size: linear layers that do so",
    "attention.backend": "no GPU kernel: the precision in which it computes",
    "attention.merge": "no split-KV kernel: attention over two parts of the keys, merged wrongly",
    "kv_cache.quantized": "float8 and int8 rounding of what is written, with no kernel that reads it as such",
    "weights.fused_copy": "projections that a sync does not reach, in a model whose projections are apart",
    "moe.routing": "no grouped GEMM: noise and precision of the router itself",
}
"""Cause id -> what stands for the real thing on a CPU. Every id of the design has a fault."""


def chosen_faults(only: str | None, faults: Mapping[str, Fault] = FAULTS) -> list[Fault]:
    """Faults by family (``rope``), cause (``rope.dtype``) or name; all for None.

    Raises:
        ConfigError: nothing bears that name.
    """
    if only is None:
        return list(faults.values())
    found = [fault for fault in faults.values() if only in (fault.name, fault.cause, family(fault.cause))]
    if not found:
        causes = sorted({fault.cause for fault in faults.values()})
        raise ConfigError(f"--only {only}: no fault of the suite; one of {', '.join(causes)}")
    return found


def make_case(fault: Fault, seed: int) -> Case:
    """One fault with one seed."""
    draw = random.Random(f"{fault.name}/{seed}")
    sizes = fault.magnitudes
    return Case(
        fault=fault.name,
        cause=fault.cause,
        seed=seed,
        architecture=draw.choice(fault.architectures),
        dtype=draw.choice(fault.dtypes),
        side=draw.choice(fault.sides),
        layer=draw.randrange(LAYERS),
        magnitude=sizes[seed % len(sizes)] if sizes else None,
    )


def layout_of(fault: Fault, seed: int) -> str:
    """How the training side lays out its batch."""
    return random.Random(f"layout/{fault.name}/{seed}").choice(fault.layouts)
