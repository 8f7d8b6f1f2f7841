"""Assumptions about a key-value cache: rows of other weights, rounded rows, a lost row at a seam.

Takes the cores of one layer; gives attempts.

Axes: T tokens, G key heads, K head size.
"""
# pyright: standard

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trainfer.check.replay.hypotheses import Hypothesis, first_bad
from trainfer.check.replay.trials_attention import Change, Core, causal, run_core
from trainfer.check.replay.trials_cores import AttentionFacts, Neighbours, attempt, slots_in_front
from trainfer.check.replay.trials_sites import LOW_DTYPES, Attempt, Site


def old_cache_attempts(facts: AttentionFacts) -> Iterator[Attempt]:
    """Keys and values of a prefix from the weights before."""
    if not any(facts.old):
        return
    predicted: list[Tensor] = []
    for core, old in zip(facts.cores, facts.old, strict=True):
        if old is None:
            predicted.append(run_core(core))
            continue
        keys, values, stop = old
        held = torch.arange(len(core.k_TGK)) < stop
        changed = replace(
            core,
            k_TGK=torch.where(held[:, None, None], keys, core.k_TGK),
            v_TGK=torch.where(held[:, None, None], values, core.v_TGK),
        )
        predicted.append(run_core(changed))
    stops = sorted({old[2] for old in facts.old if old is not None})
    text = (
        f"keys and values of positions below {stops[-1]} are those of the weights before; queries are fresh"
    )
    yield Attempt(
        hypothesis=Hypothesis(
            cause="kv_cache.stale_prefix", parameters={"prefix": float(stops[-1])}, evidence=(text,)
        ),
        predicted=tuple(predicted),
    )


def _to_float8(dtype: torch.dtype, *, scaled: str) -> Callable[[Tensor], Tensor]:
    top = torch.finfo(dtype).max

    def store(t: Tensor) -> Tensor:
        scale = _scales(t, scaled) / top if scaled else torch.ones(1, dtype=t.dtype)
        return (t / scale).clamp(-top, top).float().to(dtype).double() * scale

    return store


def _to_int(bits: int, *, scaled: str) -> Callable[[Tensor], Tensor]:
    top = 2 ** (bits - 1) - 1

    def store(t: Tensor) -> Tensor:
        scale = _scales(t, scaled) / top
        return (t / scale).round().clamp(-top - 1, top) * scale

    return store


def _scales(t: Tensor, scaled: str) -> Tensor:
    dims = {"tensor": (0, 1, 2), "head": (0, 2), "token and head": (2,), "token": (1, 2), "channel": (0,)}[
        scaled
    ]
    return t.abs().amax(dims, keepdim=True).clamp_min(1e-30)


def _stores() -> dict[str, Callable[[Tensor], Tensor]]:
    stores: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, dtype in (("FP8 E4M3", torch.float8_e4m3fn), ("FP8 E5M2", torch.float8_e5m2)):
        stores[name] = _to_float8(dtype, scaled="")
        for scaled in ("tensor", "head", "token and head", "token", "channel"):
            stores[f"{name}, one scale a {scaled}"] = _to_float8(dtype, scaled=scaled)
    for bits in (8, 4):
        for scaled in ("token and head", "head", "tensor", "token", "channel"):
            stores[f"INT{bits}, one scale a {scaled}"] = _to_int(bits, scaled=scaled)
    for name, dtype in LOW_DTYPES.items():
        stores[name] = lambda t, d=dtype: t.to(d).double()
    return stores


def quantised_attempts(facts: AttentionFacts) -> Iterator[Attempt]:
    """Keys and values that come out of the cache rounded."""
    decodes = any(bool(rows.any()) for rows in facts.decode)
    for name, store in _stores().items():
        for what, keys, values in (
            ("keys and values", store, store),
            ("keys", store, None),
            ("values", None, store),
        ):
            for only in (False, True) if decodes else (False,):
                changes = [
                    Change(keys=keys, values=values, rows=rows if only else None) for rows in facts.decode
                ]
                text = f"{what} come out of the cache rounded to {name}"
                text += "; only decode rows read them so" if only else ""
                yield attempt(facts, "kv_cache.quantized", changes, text, grid=True, stored=name, what=what)


def seam_attempts(site: Site, facts: AttentionFacts, bad: Sequence[np.ndarray]) -> Iterator[Attempt]:
    """A key near a seam is lost, doubled or empty from some row on; the seam is where rows begin to be off."""
    firsts = [first_bad(errors, site.floor) for errors in bad]
    if not any(first is not None for first in firsts):
        return
    shown = min(first for first in firsts if first is not None)
    ways = {"is not seen": _lost, "is empty in the cache": _blank, "holds the position before it": _copied}
    for back in (1, 0, 2, None):
        for text, way in ways.items():
            changes = [
                Change() if first is None else way(core, first, 0 if back is None else max(first - back, 0))
                for core, first in zip(facts.cores, firsts, strict=True)
            ]
            key = "position 0" if back is None else f"position {max(shown - back, 0)}"
            words = f"from row {shown} on {key} {text}"
            yield attempt(facts, "kv_cache.seam", changes, words, row=shown)
    yield from _moved_attempts(facts, firsts, shown)


_MAX_STARTS = 64
"""Slots at which moved entries may begin."""


def _moved_attempts(facts: AttentionFacts, firsts: Sequence[int | None], shown: int) -> Iterator[Attempt]:
    """From a slot to the seam all entries stand one slot aside: a chunk was written to the wrong place.

    Slots are those of the batch entry, the same ones in all sequences, padding in front of a sequence included.
    """
    pads = slots_in_front(facts)
    seam = min(pad + first for pad, first in zip(pads, firsts, strict=True) if first is not None)
    for by, text in ((1, "one slot too late"), (-1, "one slot too early")):
        for start in range(min(seam, _MAX_STARTS)):
            changes = [
                Change() if first is None else _moved(core, near, first, by, start)
                for core, near, first in zip(facts.cores, facts.neighbours, firsts, strict=True)
            ]
            words = f"from row {shown} on the entries of slots {start} to {seam - 1} stand {text}"
            yield attempt(facts, "kv_cache.seam", changes, words, row=shown, moved=by)

    for size in _BLOCK_SIZES:
        for start in range(min(seam - size, _MAX_STARTS)):
            changes = [
                Change() if first is None else _repeated(core, near, first, size, start)
                for core, near, first in zip(facts.cores, facts.neighbours, firsts, strict=True)
            ]
            words = f"from row {shown} on the last {size} slots before the seam hold slots {start} to {start + size - 1} again"
            yield attempt(facts, "kv_cache.seam", changes, words, row=shown, block=size)


_BLOCK_SIZES = (2, 4, 8, 16)


def _repeated(core: Core, near: Neighbours | None, first: int, size: int, start: int) -> Change:
    """A block table that names one block twice."""

    def repeated(slots: Tensor, stop: int) -> Tensor:
        changed = slots.clone()
        changed[stop - size : stop] = slots[start : start + size]
        return changed

    return _slots_changed(core, near, first, repeated)


def _moved(core: Core, near: Neighbours | None, first: int, by: int, start: int) -> Change:
    def moved(slots: Tensor, stop: int) -> Tensor:
        changed = slots.clone()
        if by > 0:
            changed[start + 1 : stop] = slots[start : stop - 1]
        else:
            changed[start : stop - 1] = slots[start + 1 : stop]
        return changed

    return _slots_changed(core, near, first, moved)


def _slots_changed(
    core: Core, near: Neighbours | None, first: int, change: Callable[[Tensor, int], Tensor]
) -> Change:
    """``change(slots of the batch entry, those before the seam)``, seen by rows from ``first`` on."""

    def changed(own: Tensor, before: Tensor | None) -> Tensor:
        slots = own if before is None else torch.cat([before, own])
        pad = len(slots) - len(own)
        return change(slots, pad + first)[pad:]

    return Change(
        keys=lambda keys: changed(keys, None if near is None else near.keys_SGK),
        values=lambda values: changed(values, None if near is None else near.values_SGK),
        rows=torch.arange(len(core.q_THK)) >= first,
    )


def _lost(core: Core, first: int, key: int) -> Change:
    return Change(
        visible=lambda rows, keys: (
            causal(rows, keys, core.window) & ~((keys == key) & (rows >= first) & (rows != key))
        )
    )


def _blank(core: Core, first: int, key: int) -> Change:
    def blank(t: Tensor) -> Tensor:
        return torch.where((torch.arange(len(t)) == key)[:, None, None], torch.zeros_like(t), t)

    return Change(keys=blank, values=blank, rows=torch.arange(len(core.q_THK)) >= first)


def _copied(core: Core, first: int, key: int) -> Change:
    def copied(t: Tensor) -> Tensor:
        place = (torch.arange(len(t)) == key)[:, None, None]
        return torch.where(place, t[max(key - 1, 0)], t)

    return Change(keys=copied, values=copied, rows=torch.arange(len(core.q_THK)) >= first)
