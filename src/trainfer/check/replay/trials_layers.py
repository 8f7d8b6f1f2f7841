"""One attention layer's cores, from what a side captured: queries, keys, values, rotary tables, and what lay beside them.

Takes a bench and a site of kind ``attention``; gives the facts that its trials need, or None where its core is more than
softmax(q k) v over visible keys: the core is computed from the same values and held against the model's own.
"""
# pyright: standard

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainfer.check.align.points import Point, Source
from trainfer.check.dump.records import MISSING
from trainfer.check.replay.trials_attention import Core, rotate, run_core
from trainfer.check.replay.trials_bench import SIDES, Bench
from trainfer.check.replay.trials_cores import AttentionFacts, Neighbours
from trainfer.check.replay.trials_forced import Trace
from trainfer.check.replay.trials_sites import Site

_AGREES = 1e-5
"""Relative difference of our core and the model's own, in float64 from the same values."""


def attention_facts(bench: Bench, site: Site) -> AttentionFacts | None:
    """Cores of all usable traces; None where ours is not the model's."""
    rotaries: list[str | None] = [n for n in bench.modules if "rotary" in n.rpartition(".")[2]]
    traces = site.usable()
    for rotary in [*rotaries, None]:
        cores = [_core(site, trace, rotary) for trace in traces]
        if cores and all(
            core is not None and _agrees(site, core, t) for core, t in zip(cores, traces, strict=True)
        ):
            whole = tuple(core for core in cores if core is not None)
            return _facts(bench, site, whole, rotary)
    return None


def _core(site: Site, trace: Trace, rotary: str | None) -> Core | None:
    size = getattr(site.layer, "head_dim", None)
    parts = _parts(site, trace)
    if parts is None or not isinstance(size, int):
        return None
    length = len(parts[0])
    q, k, v = (part.reshape(length, -1, size) for part in parts)
    tables = (None, None)
    if rotary is not None:
        cos, sin = trace.at(rotary, "output"), trace.at(rotary, "output", "1")
        if cos is None or sin is None or cos.computed_TD.shape[1] > size:
            return None
        tables = cos.used_TD, sin.used_TD
    scale = getattr(site.layer, "scaling", None)
    window = getattr(site.layer, "sliding_window", None)
    softcap = getattr(site.layer, "attn_logit_softcapping", None)
    return Core(
        q_THK=q,
        k_TGK=k,
        v_TGK=v,
        cos_TR=tables[0],
        sin_TR=tables[1],
        scale=float(scale) if isinstance(scale, int | float) else size**-0.5,
        window=int(window) if isinstance(window, int) and window > 0 else None,
        softcap=float(softcap) if isinstance(softcap, int | float) else None,
    )


def _parts(site: Site, trace: Trace) -> tuple[Tensor, Tensor, Tensor] | None:
    fused = trace.at(f"{site.module}.c_attn", "output")
    if fused is not None:
        q, k, v = fused.used_TD.chunk(3, dim=1)
        return q, k, v
    found: list[Tensor] = []
    for names in (("q_norm", "q_proj"), ("k_norm", "k_proj"), ("v_norm", "v_proj")):
        seen = [trace.at(f"{site.module}.{name}", "output") for name in names]
        first = next((item for item in seen if item is not None), None)
        if first is None:
            return None
        found.append(first.used_TD)
    return found[0], found[1], found[2]


def _agrees(site: Site, core: Core, trace: Trace) -> bool:
    rows = site.rows(trace)
    if rows is None:
        return False
    ours = run_core(core)
    if ours.shape != rows[0].shape:
        return False
    return bool((ours - rows[0]).norm() <= _AGREES * rows[0].norm().clamp_min(1e-30))


def _facts(bench: Bench, site: Site, cores: tuple[Core, ...], rotary: str | None) -> AttentionFacts:
    side = SIDES.index(site.side)
    key = _point_of(bench, site, side, ("k_norm", "k_proj", "c_attn"))
    value = _point_of(bench, site, side, ("v_norm", "v_proj", "c_attn"))
    traces = site.usable()
    missing, decode, old, near = [], [], [], []
    for trace, core in zip(traces, cores, strict=True):
        tokens = bench.records[trace.label][side].tokens
        version = bench.version(trace.label, side)
        places = bench.rows[side].places(tokens, trace.label, version)
        missing.append(torch.tensor([not here for here in places]))
        raw = bench.rows[side].raw
        decode.append(torch.tensor([bool(here) and raw.passes[here[0][0]] == "decode" for here in places]))
        old.append(_old(bench, side, trace.label, core, key, value, missing[-1]))
        near.append(_neighbours(bench, side, trace.label, core, key, value, rotary))
    return AttentionFacts(
        cores=cores, neighbours=tuple(near), missing=tuple(missing), old=tuple(old), decode=tuple(decode)
    )


def _point_of(bench: Bench, site: Site, side: int, names: Sequence[str]) -> Point | None:
    for name in names:
        point = Point(
            module=f"{site.module}.{name}",
            function="",
            occurrence=0,
            phase="forward",
            direction="output",
            part="output",
        )
        if point in bench.rows[side].sources:
            return point
    return None


def _old(
    bench: Bench,
    side: int,
    label: int,
    core: Core,
    key: Point | None,
    value: Point | None,
    missing: Tensor,
) -> tuple[Tensor, Tensor, int] | None:
    """Keys and values of the rows that a cache supplied, as an earlier version computed them."""
    stop = int((~missing).float().argmax()) if bool((~missing).any()) else 0
    if key is None or value is None or stop == 0:
        return None
    tokens = bench.records[label][side].tokens
    current = bench.version(label, side)
    for version in bench.rows[side].versions(tokens):
        if version == current:
            continue
        keys = bench.rows[side].captured(key, tokens, label, version)
        values = bench.rows[side].captured(value, tokens, label, version)
        if keys is None or values is None or not bool(keys.known_T[:stop].all()):
            continue
        k, v = _key_value(keys.values_TD, values.values_TD, core)
        return k, v, stop
    return None


def _key_value(keys_SD: Tensor, values_SD: Tensor, core: Core) -> tuple[Tensor, Tensor]:
    """By heads; both out of one row where queries, keys and values come from one projection (GPT-2's ``c_attn``)."""
    shape = (len(keys_SD), *core.k_TGK.shape[1:])
    width = core.k_TGK[0].numel()
    if keys_SD.shape[1] == 3 * width:
        keys_SD, values_SD = keys_SD[:, width : 2 * width], values_SD[:, 2 * width :]
    return keys_SD.reshape(shape), values_SD.reshape(shape)


def _neighbours(
    bench: Bench,
    side: int,
    label: int,
    core: Core,
    key: Point | None,
    value: Point | None,
    rotary: str | None,
) -> Neighbours | None:
    """Slots before the sequence's own in the batch entry of the call that ran its first row."""
    if key is None or value is None:
        return None
    rows = bench.rows[side]
    places = rows.places(bench.records[label][side].tokens[:1], label, bench.version(label, side))[0]
    if not places:
        return None
    table, slot = places[0]
    sources = [_in_table(rows.sources.get(point, ()), table) for point in (key, value)]
    if sources[0] is None or sources[1] is None:
        return None
    record = sources[0].first
    length = record.shape[record.row_dims[-1]] if len(record.row_dims) == 2 else sources[0].slots
    start = slot - slot % max(length, 1)
    if slot == start:
        return None
    tensors = [rows.rows(source) for source in sources if source is not None]
    if any(tensor is None for tensor in tensors):
        return None
    before = [tensor[start:slot].double() for tensor in tensors if tensor is not None]
    k, v = _key_value(before[0], before[1], core)
    tables = _tables(bench, side, rotary, table, start, slot)
    if rotary is not None:
        if tables is None:
            return None
        k = rotate(k, *tables)
    padding = int(np.count_nonzero(rows.raw.slots[table]["position"][start:slot] == MISSING))
    return Neighbours(keys_SGK=k, values_SGK=v, padding=padding)


def _tables(
    bench: Bench, side: int, rotary: str | None, table: tuple[int, int], start: int, stop: int
) -> tuple[Tensor, Tensor] | None:
    found: list[Tensor] = []
    for part in ("output", "1"):
        point = Point(
            module=rotary or "", function="", occurrence=0, phase="forward", direction="output", part=part
        )
        source = _in_table(bench.rows[side].sources.get(point, ()), table)
        rows = bench.rows[side].rows(source) if source is not None else None
        if rows is None or len(rows) < stop:
            return None
        found.append(rows[start:stop].double())
    return found[0], found[1]


def _in_table(sources: Sequence[Source], table: tuple[int, int]) -> Source | None:
    return next((source for source in sources if (source.rank, source.table) == table), None)
