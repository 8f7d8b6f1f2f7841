"""Assumptions about attention: what a row sees, how scores are made, what the cache held, how parts were merged.

Takes a site of kind ``attention`` whose core is at hand; gives attempts. Each follows from the maths: a window touches
no row that it covers, a leak touches no first sequence, a cap and a scale change every row but the first, a quantised
cache changes rows by the size of its step, a wrong merge leaves each head on the line between its two parts.

Axes: T tokens, H query heads, G key heads, K head size.
"""
# pyright: standard

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainfer.check.replay.hypotheses import Hypothesis, first_bad
from trainfer.check.replay.trials_attention import Change, Core, causal, parts_at, run_core, weights_of
from trainfer.check.replay.trials_cache import old_cache_attempts, quantised_attempts, seam_attempts
from trainfer.check.replay.trials_cores import AttentionFacts, attempt, errors_of, leading
from trainfer.check.replay.trials_kernels import precision_attempts
from trainfer.check.replay.trials_sites import Attempt, Site


def attention_attempts(site: Site, facts: AttentionFacts) -> Iterator[Attempt]:
    """What may be otherwise in one layer's attention, what touches least rows first."""
    traces = site.usable()
    bad = [errors_of(site, number) for number in range(len(traces))]
    yield from old_cache_attempts(facts)
    yield from _neighbours(facts)
    yield from _window(site, facts, bad)
    yield from _mask(facts)
    yield from _softcap(site, facts)
    yield from _scale(site, facts)
    yield from _merge(site, facts, bad)
    yield from quantised_attempts(facts)
    yield from seam_attempts(site, facts, bad)
    yield from _layout(facts)
    yield from precision_attempts(facts)
    yield from _dropout(site, facts)


def _neighbours(facts: AttentionFacts) -> Iterator[Attempt]:
    """Slots of the same batch entry that are not this sequence's."""
    if not any(facts.neighbours):
        return
    changes = [
        Change(extra=(n.keys_SGK, n.values_SGK)) if n is not None else Change() for n in facts.neighbours
    ]
    others = sum(len(n.keys_SGK) - n.padding for n in facts.neighbours if n is not None)
    padding = sum(n.padding for n in facts.neighbours if n is not None)
    spared = sum(n is None for n in facts.neighbours)
    if others:
        text = f"rows see {others} slots of sequences packed before their own; {spared} sequences without such slots are exact"
        yield attempt(facts, "attention.cross_sequence", changes, text, slots=float(others))
        last = [
            Change() if n is None else Change(extra=(n.keys_SGK[-1:], n.values_SGK[-1:]))
            for n in facts.neighbours
        ]
        text = f"rows see the last slot of the sequence packed before their own; {spared} sequences without one are exact"
        yield attempt(facts, "attention.cross_sequence", last, text, slots=1.0)
    elif padding:
        text = f"rows see {padding} padding slots; {spared} sequences without padding are exact"
        yield attempt(facts, "attention.mask", changes, text, slots=float(padding))


def _window(site: Site, facts: AttentionFacts, bad: Sequence[np.ndarray]) -> Iterator[Attempt]:
    own = facts.cores[0].window
    firsts = [first_bad(errors, site.floor) for errors in bad]
    found = [first for first in firsts if first is not None and first > 0]
    said = site.attributes.get("sliding_window")
    sizes: list[int] = [said] if isinstance(said, int) and said > 0 else []
    sizes += [size for first in sorted(set(found)) for size in (first, first + 1) if size not in sizes]
    if own is not None:
        text = (
            f"the reference sees the last {own} positions only; this side sees all: rows from {own} on differ"
        )
        yield attempt(facts, "attention.window", Change(window=None), text, window="none", reference=own)
    for size in sizes[:8]:
        if size < 1 or size == own:
            continue
        text = f"rows below position {size} are exact: this side sees the last {size} positions only"
        text += "" if own is None else f", the reference {own}"
        yield attempt(facts, "attention.window", Change(window=size), text, window=size, reference=str(own))


def _mask(facts: AttentionFacts) -> Iterator[Attempt]:
    window = facts.cores[0].window
    variants: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
        "every row sees the whole sequence: no causal mask": lambda rows, keys: (keys >= 0) & (rows >= 0),
        "every row sees one position too many": lambda rows, keys: keys <= rows + 1,
        "no row sees itself": lambda rows, keys: (keys < rows) | ((rows == 0) & (keys == 0)),
        "no row sees the first position": lambda rows, keys: (
            causal(rows, keys, window) & ((keys > 0) | (rows == 0))
        ),
    }
    for text, visible in variants.items():
        yield attempt(facts, "attention.mask", Change(visible=visible), text, seen=text)
    if any(bool(rows.any()) for rows in facts.decode):
        text = "every row of the prefill sees the whole prompt: no causal mask; decode is right"
        prompts = [leading(~rows) for rows in facts.decode]
        changes = [Change(visible=_whole_prompt(length, window)) for length in prompts]
        yield attempt(facts, "attention.mask", changes, text, seen=text)


def _whole_prompt(length: int, window: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda rows, keys: torch.where(rows < length, keys < length, causal(rows, keys, window))


def _fit(
    site: Site, facts: AttentionFacts, values: Sequence[float], change: Callable[[float], Change]
) -> float:
    """The value that leaves least, from a grid and by halving its step (the error has one minimum)."""
    traces = site.usable()

    def left(value: float) -> float:
        total = 0.0
        for trace, core in zip(traces, facts.cores, strict=True):
            rows = site.rows(trace)
            assert rows is not None
            _, captured, known = rows
            total += float((run_core(core, change(value)) - captured)[known].square().sum())
        return total

    logs = [float(np.log(value)) for value in values]
    scores = [left(value) for value in values]
    place = int(np.argmin(scores))
    low, high = logs[max(place - 1, 0)], logs[min(place + 1, len(logs) - 1)]
    ratio = (np.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = left(float(np.exp(a))), left(float(np.exp(b)))
    for _ in range(40):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = left(float(np.exp(a)))
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = left(float(np.exp(b)))
    return float(np.exp((low + high) / 2))


def _near(value: float) -> list[float]:
    """The value as people write it, and as fitted."""
    return list(dict.fromkeys([float(f"{value:.1g}"), float(f"{value:.2g}"), float(f"{value:.3g}"), value]))


def _softcap(site: Site, facts: AttentionFacts) -> Iterator[Attempt]:
    own = facts.cores[0].softcap
    if own is not None:
        text = f"the reference caps scores at {own:g}; this side does not"
        yield attempt(facts, "attention.softcap", Change(softcap=None), text, softcap="none", reference=own)
    fitted = _fit(site, facts, [2.0**n for n in range(-2, 10)], lambda value: Change(softcap=value))
    for value in _near(fitted):
        text = f"scores are capped at {value:.4g} on this side"
        text += ", in the reference not" if own is None else f", in the reference at {own:g}"
        yield attempt(
            facts, "attention.softcap", Change(softcap=value), text, softcap=value, reference=str(own)
        )


def _scale(site: Site, facts: AttentionFacts) -> Iterator[Attempt]:
    own = facts.cores[0].scale
    fitted = _fit(site, facts, [own * 2.0**n for n in range(-4, 5)], lambda value: Change(scale=value))
    text = f"scores are multiplied by {fitted:.6g}, in the reference by {own:.6g} ({fitted / own:.5g} times)"
    yield attempt(facts, "attention.scale", Change(scale=fitted), text, scale=fitted, reference=own)


def _merge(site: Site, facts: AttentionFacts, bad: Sequence[np.ndarray]) -> Iterator[Attempt]:
    """Two parts of the context, each right, put together with wrong weights; the split is where rows begin to be off."""
    firsts = [first_bad(errors, site.floor) for errors in bad]
    if not any(firsts) or facts.cores[0].q_THK.shape[2] < _MIN_FEATURES:
        return
    predicted: list[Tensor] = []
    for number, (core, first) in enumerate(zip(facts.cores, firsts, strict=True)):
        rows = site.rows(site.usable()[number])
        assert rows is not None
        if first is None or first == 0:
            predicted.append(run_core(core))
            continue
        tried = [_on_the_line(rows[1], core, split) for split in (first, first + 1)]
        captured, known = rows[1], rows[2]
        left = [float((made - captured)[known].square().sum()) for made in tried]
        predicted.append(tried[left.index(min(left))])
    splits = sorted({first for first in firsts if first})
    text = (
        f"each head's row lies on the line between its attention over positions before and after {splits[0]}"
    )
    text += "" if len(splits) == 1 else f" (in other sequences up to {splits[-1]})"
    text += f", with other weights than their sums': one number a head and row explains {facts.cores[0].q_THK.shape[2]}"
    yield Attempt(
        hypothesis=Hypothesis(
            cause="attention.merge", parameters={"split": float(splits[0])}, evidence=(text,)
        ),
        predicted=tuple(predicted),
    )


_MIN_FEATURES = 4
"""Of a head, for one fitted number to prove something."""


def _on_the_line(captured_TD: Tensor, core: Core, split: int) -> Tensor:
    first, second, _, _ = parts_at(core, split)
    captured = captured_TD.reshape(first.shape)
    along = first - second
    size = along.square().sum(-1, keepdim=True).clamp_min(1e-30)
    share = ((captured - second) * along).sum(-1, keepdim=True) / size
    fitted = second + share * along
    alone = (torch.arange(len(first)) < split)[:, None, None]
    return torch.where(alone, first, fitted).reshape(len(first), -1)


def _layout(facts: AttentionFacts) -> Iterator[Attempt]:
    if facts.cores[0].cos_TR is None:
        return
    text = "neighbouring features are turned as pairs (interleaved), in the reference the two halves"
    yield attempt(facts, "rope.layout", Change(interleaved=True), text, layout="interleaved")


_DROPOUT_ROWS = 2


def _dropout(site: Site, facts: AttentionFacts) -> Iterator[Attempt]:
    """Weights dropped at random: every head's row is a sum of its terms, each times 0 or 1 / (1 − p).

    Terms are told apart where there are at most half as many of them as a head has features.
    """
    ratios: list[float] = []
    predicted: list[Tensor] = []
    for number, core in enumerate(facts.cores):
        rows = site.rows(site.usable()[number])
        assert rows is not None
        fitted, found = _terms(core, rows[1].reshape(core.q_THK.shape), rows[2])
        predicted.append(fitted)
        ratios += found
    if len(ratios) < _DROPOUT_ROWS:
        return
    values = np.array(ratios)
    zero = np.abs(values) < 0.02
    if not zero.any() or zero.all():
        return
    factor = float(np.median(values[~zero]))
    if factor < 1.005 or np.mean(np.abs(values[~zero] / factor - 1) < 0.03) < 0.9:
        return
    rate = 1 - 1 / factor
    evidence = (
        f"{int(zero.sum())} of {len(values)} weights are 0 and the others {factor:.4g} times what they should be: "
        f"dropout with p = {rate:.3g}",
    )
    yield Attempt(
        hypothesis=Hypothesis(cause="mode.dropout", parameters={"p": rate}, evidence=evidence),
        predicted=tuple(predicted),
    )


def _terms(core: Core, captured_THK: Tensor, known_T: Tensor) -> tuple[Tensor, list[float]]:
    """Captured rows refitted by their terms where these can be told apart, and the factors of the weights."""
    weights = weights_of(core)
    groups = core.q_THK.shape[1] // core.v_TGK.shape[1]
    fitted, ratios = captured_THK.clone(), list[float]()
    for row in range(min(len(captured_THK), max(core.q_THK.shape[2] // 2, 1))):
        if not bool(known_T[row]):
            continue
        for head in range(core.q_THK.shape[1]):
            weight = weights[head, row, : row + 1]
            terms = (weight[:, None] * core.v_TGK[: row + 1, head // groups]).T
            target = captured_THK[row, head][:, None]
            solution = torch.linalg.lstsq(terms, target).solution
            fitted[row, head] = (terms @ solution)[:, 0]
            ratios += solution[weight > 1e-3, 0].tolist()
    return fitted.reshape(len(fitted), -1), ratios
