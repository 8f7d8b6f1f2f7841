"""Runs both sides of a pair: generation with a key/value cache, and the training forward.

Takes a pair and, where it is to be captured, a folder; gives the sequences and both sides' log-probs. Sampling and
dropout draw from the case's seed, so that a case is the same each time.

Axes: B entries, T slots, V vocabulary.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from trainfer.check.probe.capture import Capture, capture
from trainfer.check.probe.given import Rows
from trainfer.faults.models import END, PAD, VOCABULARY
from trainfer.faults.pair import Pair, Read
from trainfer.faults.records import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One side's record of one step."""

    batch: Batch
    logprobs: list[list[float]]
    """Per sequence, one per response token."""


def run_pair(pair: Pair, folder: Path | None = None) -> list[tuple[Recorded, Recorded]]:
    """Run every step; capture into ``folder/rollout`` and ``folder/train`` where a folder is given."""
    done: list[tuple[Recorded, Recorded]] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        captures = dict.fromkeys(("rollout", "train")) if folder is None else _captures(pair, folder, stack)
        for step in range(pair.steps):
            if step > 0:
                for change in pair.between:
                    change(pair, step)
                for side, capture in captures.items():
                    if capture is not None:
                        capture.step(weights_version=pair.versions[side] + step)
            torch.manual_seed(1000 * pair.seed + step)
            first = generate(pair, captures["rollout"], step)
            second = score(pair, first.batch, captures["train"])
            done.append((first, second))
    return done


def _captures(pair: Pair, folder: Path, stack: ExitStack) -> dict[str, Capture | None]:
    return {
        side: stack.enter_context(
            capture(
                pair.model_of(side),
                folder / side,
                side=side,
                pass_name=("update" if pair.train.grad else "old_log_prob") if side == "train" else None,
                weights_version=pair.versions[side],
                weights=pair.weights,
                backward=False,
            )
        )
        for side in ("rollout", "train")
    }


# --- rollout ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(pair: Pair, capture: Capture | None, step: int) -> Recorded:
    """Sample responses and record them."""
    plan, model = pair.rollout, pair.rollout_model
    draw = torch.Generator().manual_seed(77_000 + 100 * pair.seed + step)
    ids, mask = padded([tuple(prompt) for prompt in plan.prompts], "left")
    if plan.prefix:
        assert bool(mask.all()), "prompts with a cached prefix have equal lengths here"
    if plan.warm_up:
        model(input_ids=torch.full((2, 16), 3), use_cache=False)
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    cache = plan.make_cache(model)
    if plan.prefix:
        _fill_prefix(pair, cache, ids[:, : plan.prefix])
    done = torch.zeros(len(ids), dtype=torch.bool)
    responses: list[list[int]] = [[] for _ in plan.prompts]
    logits_BV = _prefill(pair, cache, ids, mask, capture)
    rows: list[list[Tensor]] = [[] for _ in plan.prompts]
    for number in range(plan.new):
        chosen_B = _sample(logits_BV, pair, draw, may_end=number >= plan.least)
        for entry in range(len(ids)):
            if not done[entry]:
                responses[entry].append(int(chosen_B[entry]))
                rows[entry].append(logits_BV[entry])
        chosen_B = torch.where(done, torch.full_like(chosen_B, PAD), chosen_B)
        done |= chosen_B == END
        ids, mask = torch.cat([ids, chosen_B[:, None]], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if number + 1 < plan.new or plan.runs_last:
            logits_BV = _call(pair, cache, ids, mask, ids.shape[1] - 1, ids.shape[1], capture)
    batch = Batch(
        tokens=tuple((*prompt, *response) for prompt, response in zip(plan.prompts, responses, strict=True)),
        prompt_lengths=tuple(len(prompt) for prompt in plan.prompts),
    )
    return _record(pair, "rollout", batch, [torch.stack(row) for row in rows], capture)


def padded(
    sequences: list[tuple[int, ...]] | tuple[tuple[int, ...], ...], side: str
) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[B, T]``."""
    length = max(map(len, sequences))
    ids = torch.full((len(sequences), length), PAD)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        part = slice(0, len(sequence)) if side == "right" else slice(length - len(sequence), length)
        ids[row, part] = torch.tensor(sequence)
        mask[row, part] = 1
    return ids, mask


def _prefill(pair: Pair, cache: Cache, ids: Tensor, mask: Tensor, capture: Capture | None) -> Tensor:
    start, length = pair.rollout.prefix, ids.shape[1]
    size = pair.rollout.chunk or length
    logits_BV = torch.empty(0)
    while start < length:
        stop = min(start + size, length)
        logits_BV = _call(pair, cache, ids, mask, start, stop, capture)
        if stop < length and pair.rollout.after_chunk is not None:
            pair.rollout.after_chunk(cache, stop)
        start = stop
    return logits_BV


def _call(
    pair: Pair, cache: Cache, ids: Tensor, mask: Tensor, start: int, stop: int, capture: Capture | None
) -> Tensor:
    """Run slots ``start`` to ``stop``; gives the last slot's logits ``[B, V]``."""
    plan = pair.rollout
    by_mask = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:stop]
    slots = torch.arange(start, stop)[None].expand_as(by_mask)
    decoding = start >= max(len(prompt) for prompt in plan.prompts)
    wrong = plan.positions == "slots" or (plan.positions == "decode_slots" and decoding)
    if plan.prefix and capture is not None:
        capture.use_rows(_named_rows(ids, start, stop, plan.prefix))
    out = pair.rollout_model(
        input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=slots if wrong else by_mask,
        past_key_values=cache, use_cache=True,
    )  # fmt: skip
    return out.logits[:, -1].float()


def _named_rows(ids: Tensor, start: int, stop: int, prefix: int) -> Rows:
    entries = range(len(ids))
    return Rows(
        token_ids=ids[:, start:stop].flatten().tolist(),
        requests=[entry for entry in entries for _ in range(start, stop)],
        positions=[place for _ in entries for place in range(start, stop)],
        prefixes={entry: ids[entry, :prefix].tolist() for entry in entries},
    )


def _fill_prefix(pair: Pair, cache: Cache, ids: Tensor) -> None:
    """Keys and values of prompts' first tokens, from models that no capture watches: as a prefix cache holds them."""
    assert pair.rollout.prefix_models is not None, "a cached prefix names the models that it comes from"
    held = []
    for row, model in enumerate(pair.rollout.prefix_models):
        own = pair.rollout.make_cache(model)
        model(input_ids=ids[row : row + 1], past_key_values=own, use_cache=True)
        held.append(own)
    for number in range(len(held[0].layers)):
        keys = torch.cat([own.layers[number].keys for own in held])
        values = torch.cat([own.layers[number].values for own in held])
        cache.update(keys, values, number)


def _sample(logits_BV: Tensor, pair: Pair, draw: torch.Generator, *, may_end: bool) -> Tensor:
    plan = pair.rollout
    kept = filtered(logits_BV[:, :VOCABULARY] / plan.temperature, top_p=plan.top_p, top_k=plan.top_k)
    if not may_end:
        kept[:, END] = float("-inf")
    return torch.multinomial(kept.softmax(-1), 1, generator=draw)[:, 0]


def filtered(logits_BV: Tensor, *, top_p: float = 1.0, top_k: int = -1) -> Tensor:
    """Logits with what top-k and top-p leave out at minus infinity (nucleus: Holtzman et al. 2019)."""
    if top_k > 0:
        least = logits_BV.topk(top_k, dim=-1).values[..., -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
    if top_p < 1.0:
        ordered, places = logits_BV.sort(dim=-1, descending=True)
        share = ordered.softmax(-1)
        out = torch.zeros_like(ordered, dtype=torch.bool).scatter(
            -1, places, share.cumsum(-1) - share >= top_p
        )
        logits_BV = logits_BV.masked_fill(out, float("-inf"))
    return logits_BV


# --- training --------------------------------------------------------------------------------------------------------


def score(pair: Pair, made: Batch, capture: Capture | None) -> Recorded:
    """Score the sequences with a training forward; each pass may split them otherwise, and the first is recorded."""
    plan = pair.train
    batch = made if plan.edit is None else plan.edit(made)
    recorded: list[Tensor] = []
    with torch.set_grad_enabled(plan.grad):
        for number, micro in enumerate(plan.micro):
            parts: list[Tensor] = []
            for start in range(0, len(batch.tokens), micro):
                chosen = batch.tokens[start : start + micro]
                logits = train_forward(pair.train_model, chosen, pair)
                if plan.grad:
                    torch.stack([part.logsumexp(-1).mean() for part in logits]).sum().backward()
                parts += [part.detach() for part in logits]
            recorded = parts if number == 0 else recorded
    return _record(pair, "train", batch, _scored(recorded, batch), capture, whole=recorded)


def train_forward(model: PreTrainedModel, sequences: tuple[tuple[int, ...], ...], pair: Pair) -> list[Tensor]:
    """Logits ``[tokens, V]`` in float32 of each sequence, from one forward without a cache."""
    plan = pair.train
    if plan.layout == "packed":
        ids = torch.tensor([[token for sequence in sequences for token in sequence]])
        places = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]
        mask = torch.ones_like(ids) if plan.leak else None
        logits = (
            model(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False).logits[0].float()
        )
        return list(logits.split([len(sequence) for sequence in sequences]))
    ids, mask = padded(sequences, plan.layout)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    if plan.positions == "slots":
        places = torch.arange(ids.shape[1])[None].expand_as(ids)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits.float()
    return [logits[row][mask[row].bool()] for row in range(len(sequences))]


def _scored(logits: list[Tensor], batch: Batch) -> list[Tensor]:
    """Rows whose logits score response tokens: each token by the row before it."""
    return [
        part[length - 1 : len(tokens) - 1]
        for part, tokens, length in zip(logits, batch.tokens, batch.prompt_lengths, strict=True)
    ]


# --- records ---------------------------------------------------------------------------------------------------------


def log_softmax(temperature: float = 1.0, *, top_p: float = 1.0, top_k: int = -1) -> Read:
    """Log-probs of the distribution at a temperature, after filters."""

    def read(logits_V: Tensor, token: int) -> float:
        return float(filtered(logits_V / temperature, top_p=top_p, top_k=top_k).log_softmax(-1)[token])

    return read


def _record(
    pair: Pair,
    side: str,
    batch: Batch,
    rows: list[Tensor],
    capture: Capture | None,
    whole: list[Tensor] | None = None,
) -> Recorded:
    """Turn the response rows' logits into log-probs and record them."""
    if side in pair.path:
        with torch.no_grad():
            rows = _scored(train_forward(pair.path[side], batch.tokens, pair), batch)
    declared = pair.rollout.declared if side == "rollout" else pair.train.declared
    read = pair.read.get(side) or log_softmax(float(declared.get("temperature", 1.0)))
    logprobs = [
        [read(row, token) for row, token in zip(part, tokens[length:], strict=True)]
        for part, tokens, length in zip(rows, batch.tokens, batch.prompt_lengths, strict=True)
    ]
    if side in pair.shift:
        logprobs = pair.shift[side](logprobs, whole or rows, batch)
    if capture is not None:
        capture.record_logprobs(
            sequences=batch.tokens, prompt_lengths=batch.prompt_lengths, logprobs=logprobs, sampling=declared
        )
    return Recorded(batch=batch, logprobs=logprobs)


def mean_gap(steps: list[tuple[Recorded, Recorded]]) -> float:
    """Mean |Δ log p| over response tokens of sequences that both sides hold, the last step's; nan for none."""
    first, second = steps[-1]
    gaps = [
        abs(a - b)
        for place, mine in enumerate(first.logprobs)
        for a, b in zip(mine, second.logprobs[place] if place < len(second.logprobs) else [], strict=False)
    ]
    return sum(gaps) / len(gaps) if gaps else float("nan")
