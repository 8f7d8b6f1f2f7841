"""Does this machine give a row the same bits alone and in any batch? Measured, operator by operator, before it is promised.

Takes a causal LM; gives a ``Calibration``: safe key lengths, and every operator that breaks the promise, by name. Three
looks, each comparing with ``torch.equal``:

1. every kind of linear layer and activation, by its own forward, at the row counts of decode and training against one
   large input, and the log-softmax over the vocabulary likewise;
2. attention, for every form that the model's layers ask for: which key lengths are safe, then decode against prefill
   at positions on both sides of every rule, through the very functions that trainer and engine call;
3. the model itself: sequences packed together against each alone; a row that differs names the first module that
   gave it. This is where routed experts, sliding windows or whatever else a model brings must prove themselves.

It changes neither model nor random state. What a model computes in training mode (dropout) is out of reach here, and
refused elsewhere. On a CUDA device ``gpu_linear`` measures and routes, so the second look is only whether a kernel
computes each form (``gpu_calibration``).
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainfer.errors import ModelError
from trainfer.exact import gpu_calibration
from trainfer.exact.attention import (
    DECODE_QUERY_ROWS,
    QUERY_MULTIPLE,
    AttentionForm,
    AttentionPlan,
    QueryChunk,
    causal_attention,
    decode_attention,
    masked_attention,
    query_chunks,
    round_up,
    safe_key_length,
)
from trainfer.exact.layout import lay_out
from trainfer.exact.logprobs import log_distribution
from trainfer.exact.packed import ROW_MULTIPLE, CausalModel, PackedBatch, forward_logits, pack
from trainfer.exact.row_problems import Problem, activation_problems, decode_rows, linear_problems
from trainfer.exact.rules import KEY_BLOCK, KEY_MULTIPLE, KeyLengths, using_key_lengths

_POSITIONS = (
    0, 1, 15, 16, 100, 190, 191, 192, 207, 300, 383, 384, 399, 510,
    511, 512, 530, 703, 704, 720, 896, 1023, 1024, 1090,
)  # fmt: skip
"""Where decode is held against prefill."""
_TRIAL_LENGTHS = (5, 21, 40, 9, 2, 33)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured."""

    safe_key_lengths: tuple[int, ...]
    """Within a block; see ``rules.KeyLengths``."""
    problems: tuple[Problem, ...]
    """Empty: exact mode holds here."""
    decode_rows: int = ROW_MULTIPLE
    """Of which a decode step's rows are a multiple."""

    @property
    def is_exact(self) -> bool:
        """True where every operator passed."""
        return not self.problems


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One kind of attention layer."""

    form: AttentionForm
    """Of its first layer."""
    heads: int
    groups: int
    head_size: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """For people."""
        extras = "".join(
            f", {label} {value:g}"
            for label, value in (("window", self.form.window), ("soft-cap", self.form.softcap))
            if value is not None
        )
        kind = "softcapped matmul" if self.form.softcap is not None else "scaled_dot_product_attention"
        return f"attention ({kind}, {self.heads}/{self.groups} heads of {self.head_size}{extras}, {_word(self.dtype)})"


@torch.no_grad()
def calibrate(model: nn.Module) -> Calibration:
    """Measure everything that exact mode needs of ``model`` on its device, in its dtype.

    Raises:
        ModelError: the model cannot be run on packed rows at all.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shapes = attention_shapes(model)
        on_cpu = next(model.parameters()).device.type == "cpu"
        problems = [*linear_problems(model)]
        if on_cpu:
            problems += [*activation_problems(model), *logprob_problems(model)]
        else:
            problems += [
                Problem(operator=name, detail=text) for name, text in gpu_calibration.problems(shapes)
            ]
        lengths = KeyLengths(safe=safe_lengths(shapes) if on_cpu else (KEY_BLOCK,))
        with using_key_lengths(lengths):
            if on_cpu:
                problems += [problem for shape in shapes for problem in attention_problems(shape)]
            if not problems:
                problems += trial_problems(model)
            rows = decode_rows(model) if on_cpu and not problems else ROW_MULTIPLE
    return Calibration(safe_key_lengths=lengths.safe, problems=tuple(problems), decode_rows=rows)


# The log-softmax.


def logprob_problems(model: nn.Module) -> Iterator[Problem]:
    """The log-softmax over the vocabulary."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        return
    logits_SV = torch.randn(64, embedding.num_embeddings)
    ones_S = torch.ones(64)
    reference = log_distribution(logits_SV, ones_S)
    for count in (1, 2, 3, 5, 8, 16, 33):
        if not torch.equal(log_distribution(logits_SV[:count], ones_S[:count]), reference[:count]):
            yield Problem(
                operator=f"log_softmax over {embedding.num_embeddings}", detail=f"{count} rows differ from 64"
            )
            return


# Attention.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorder:
    """A plan that notes what layers ask for."""

    plan: AttentionPlan
    shapes: dict[tuple[object, ...], AttentionShape]

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        heads, groups, size = query_THK.shape[1], key_TGK.shape[1], query_THK.shape[2]
        key = (heads, groups, size, form.scale, form.window, form.softcap, query_THK.dtype)
        if key not in self.shapes:
            self.shapes[key] = AttentionShape(
                form=form, heads=heads, groups=groups, head_size=size, dtype=query_THK.dtype
            )
        return self.plan.attend(query_THK, key_TGK, value_TGK, form)


def attention_shapes(model: nn.Module) -> list[AttentionShape]:
    """The kinds of attention layers of a model, found by running a few tokens through it.

    Raises:
        ModelError: a layer asks for what ``attention`` refuses.
    """
    batch = pack([[0] * ROW_MULTIPLE], [1], device=next(model.parameters()).device)
    recorder = _Recorder(plan=batch.plan, shapes={})
    assert callable(model)
    model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.scored_rows,
        attention_plan=recorder,
    )
    if not recorder.shapes:
        raise ModelError(
            f"{type(model).__name__} made no attention call of trainfer's; load it with load_model, and use an "
            "architecture whose layers are attention"
        )
    return list(recorder.shapes.values())


def safe_lengths(shapes: list[AttentionShape]) -> tuple[int, ...]:
    """Key lengths within a block that are safe for all of ``shapes``.

    In half precision a failure shows in about one row of a hundred, so float32 is measured as well: the library makes
    the same choices there. Lengths between two unsafe ones count as unsafe.
    """
    unsafe: set[int] = set()
    precise = [dataclasses.replace(shape, dtype=torch.float32) for shape in shapes]
    for shape in dict.fromkeys([*shapes, *precise]):
        query, key, value = _random_heads(shape, KEY_BLOCK, seed=1)
        seen = torch.ones(KEY_BLOCK, KEY_BLOCK, dtype=torch.bool).tril()
        mask = torch.zeros(KEY_BLOCK, KEY_BLOCK, dtype=shape.dtype).masked_fill_(~seen, -math.inf)
        reference = masked_attention(query, key, value, shape.form, mask)
        for length in range(KEY_MULTIPLE, KEY_BLOCK, KEY_MULTIPLE):
            rows = slice(max(0, length - QUERY_MULTIPLE), length)
            part = masked_attention(
                query[:, :, rows], key[:, :, :length], value[:, :, :length], shape.form, mask[rows, :length]
            )
            if not torch.equal(part, reference[:, :, rows]):
                unsafe.add(length)
    gap = range(min(unsafe), max(unsafe) + 1) if unsafe else range(0)
    return tuple(n for n in range(KEY_MULTIPLE, KEY_BLOCK + 1, KEY_MULTIPLE) if n not in gap)


def attention_problems(shape: AttentionShape) -> Iterator[Problem]:
    """Decode against prefill at single positions, and prefill in part against prefill in whole."""
    longest = round_up(_POSITIONS[-1] + 1, QUERY_MULTIPLE)
    query, key, value = _random_heads(shape, safe_key_length(longest), seed=2)
    masks: dict[tuple[QueryChunk, int | None], Tensor] = {}
    whole = causal_attention(query[:, :, :longest], key, value, shape.form, query_chunks(longest), masks)
    for position in _POSITIONS:
        length = safe_key_length(position + 1)
        seen = torch.arange(length) <= position
        if shape.form.window is not None:
            seen &= torch.arange(length) > position - shape.form.window
        mask = torch.zeros(1, length, dtype=shape.dtype).masked_fill_(~seen, -math.inf)
        row = decode_attention(
            query[:, :, position],
            key[:, :, :length],
            value[:, :, :length],
            shape.form,
            mask.expand(len(key), -1),
        )
        if not torch.equal(row, whole[:, :, position]):
            yield Problem(
                operator=shape.name,
                detail=f"the row at position {position} differs between decode ({length} keys, {DECODE_QUERY_ROWS} or more "
                "query rows) and a longer prefill",
            )
            return
    for first, end in ((0, 32), (16, 48), (176, 208), (368, 416), (496, 560)):
        chunks = query_chunks(end, first)
        part = causal_attention(
            query[:, :, first:end],
            key[:, :, : chunks[-1].keys],
            value[:, :, : chunks[-1].keys],
            shape.form,
            chunks,
            masks,
        )
        if not torch.equal(part, whole[:, :, first:end]):
            yield Problem(
                operator=shape.name,
                detail=f"rows {first} to {end - 1} alone differ from the same rows of {longest}",
            )
            return


def _random_heads(shape: AttentionShape, length: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query ``[2, H, L, K]``, key and value ``[2, G, L, K]``: bfloat16's failures are sparse and want many rows."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(2, heads, length, shape.head_size, generator=generator).to(shape.dtype)
        for heads in (shape.heads, shape.groups, shape.groups)
    )
    return query, key, value


# The model.


def trial_problems(model: nn.Module) -> Iterator[Problem]:
    """Sequences packed together against each alone."""
    assert callable(model)
    runnable: CausalModel = model
    device = next(model.parameters()).device
    vocabulary = next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    sequences = [torch.randint(vocabulary, (length,)).tolist() for length in _TRIAL_LENGTHS]
    prompts = [1 + length // 3 for length in _TRIAL_LENGTHS]
    together = pack(sequences, prompts, device=device)
    logits = forward_logits(runnable, together).split(list(together.response_lengths))
    for index, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        alone = pack([sequence], [prompt], device=device)
        if not torch.equal(forward_logits(runnable, alone), logits[index]):
            rows = list(lay_out(sequences, prompts).sequences[index].rows(range(len(sequence))))
            yield Problem(
                operator=_first_difference(model, together, rows, alone),
                detail=f"a sequence of {len(sequence)} tokens has other values alone than packed with others",
            )
            return


def _first_difference(model: nn.Module, together: PackedBatch, rows: list[int], alone: PackedBatch) -> str:
    """The first module, in order of completion, whose rows differ."""
    outputs = _outputs_of(model, together), _outputs_of(model, alone)
    for (name, ours), (_, theirs) in zip(*outputs, strict=False):
        if ours.dim() == 3 and ours.shape[1] == together.input_ids.shape[1]:
            index = torch.tensor(rows, device=ours.device)
            if not torch.equal(ours[0].index_select(0, index), theirs[0, : len(rows)]):
                return f"{name} ({type(model.get_submodule(name)).__name__})"
    return f"{type(model).__name__}'s head or attention"


def _outputs_of(model: nn.Module, batch: PackedBatch) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []

    def note(name: str, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if isinstance(tensor, Tensor):
            found.append((name, tensor.detach().clone()))

    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        assert callable(model)
        runnable: CausalModel = model
        forward_logits(runnable, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
