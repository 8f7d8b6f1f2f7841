"""The step as a picture in text: prompts, sequences, ranks, mini-batches, micro-batches, with units on every arrow."""

from collections.abc import Iterator

from trainfer.plan.records import Derived, Number, Plan, Span

_WIDTH = 46


def number(value: Number) -> str:
    """``15``, ``1 to 11``, or ``?``."""
    if value is None:
        return "?"
    return f"{value.min} to {value.max}" if isinstance(value, Span) else str(value)


def _many(value: Number, things: str) -> str:
    """``1 mini-batch``, ``4 mini-batches``; ``things`` is the plural."""
    if value == 1:
        things = things.removesuffix("es") if things.endswith("batches") else things.removesuffix("s")
    return f"{number(value)} {things}"


def picture(plan: Plan) -> str:
    """The picture, about 20 lines."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    d = plan.derived
    samples = _ratio(d.sequences_per_step, d.prompts_per_step)
    yield f"{_many(d.prompts_per_step, 'prompts')} a step"
    yield f"  │  x {samples} samples a prompt  (rollout.n)"
    yield "  ▼"
    yield _beside(
        f"{number(d.sequences_per_step)} sequences a step",
        f"{_many(d.rollout_replicas, 'rollout engines')} x {_many(d.sequences_per_replica, 'sequences')}",
    )
    if d.padding_sequences:
        yield f"  │  + {number(d.padding_sequences)} synthetic sequences (padding)"
    yield f"  │  / {_many(d.data_parallel_size, 'data-parallel ranks')}  ({_gpus(d)})"
    yield "  ▼"
    yield _beside(
        f"{number(d.sequences_per_rank)} sequences a rank",
        f"{_many(d.log_prob_forwards_per_rank, 'forwards')}: old log-probs"
        if d.log_prob_forwards_per_rank != 0
        else "no pass for old log-probs",
    )
    reference = f"{_many(d.ref_log_prob_forwards_per_rank, 'forwards')}: reference log-probs"
    yield _beside(
        f"  │  / {number(d.mini_batch_sequences_per_rank)} sequences a mini-batch and rank",
        reference if d.ref_log_prob_forwards_per_rank != 0 else "no reference model",
    )
    yield "  ▼"
    yield _beside(
        f"{_many(d.mini_batches_per_epoch, 'mini-batches')} an epoch",
        f"{_many(d.optimizer_steps_per_step, 'optimizer steps')} a step",
    )
    yield f"  │  / {number(d.micro_batch_sequences_per_rank)} sequences a micro-batch and rank"
    yield "  ▼"
    yield f"{_many(d.gradient_accumulation_steps, 'micro-batches')} (forward + backward) an optimizer step and rank"


def _beside(left: str, right: str) -> str:
    return f"{left:<{_WIDTH}}──▶  {right}"


def _ratio(total: Number, part: Number) -> str:
    if isinstance(total, int) and isinstance(part, int) and part and total % part == 0:
        return str(total // part)
    return "?"


def _gpus(d: Derived) -> str:
    if isinstance(d.num_gpus, int) and isinstance(d.data_parallel_size, int) and d.data_parallel_size:
        share = d.num_gpus // d.data_parallel_size
        return _many(d.num_gpus, "GPUs") + ("" if share == 1 else f" / {share} that share sequences")
    return _many(d.num_gpus, "GPUs")
