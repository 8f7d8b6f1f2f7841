"""Assumptions about projections, the head, dropout and choices.

Takes a site; gives attempts. A projection is y = W x: a low precision leaves its own rounding, an adapter adds a multiple
of B A x, a copy computes with another W that the rows themselves give away where there are enough of them.

Axes: R rows, D features.
"""
# pyright: standard

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from trainfer.check.replay.hypotheses import Hypothesis, common_factor, dropped, rank_one_scale
from trainfer.check.replay.trials_sites import LOW_DTYPES, Attempt, Site, rounded

_HELD_OUT = 0.1
"""Of the error of rows that a weight was not fitted to: so little it may leave there."""


def linear_attempts(site: Site) -> Iterator[Attempt]:
    """What may be otherwise in a projection; in the head, its precision."""
    weight = weight_of(site.layer)
    if weight is None or not site.usable():
        return
    bias = getattr(site.layer, "bias", None)
    bias = bias.detach().double() if isinstance(bias, Tensor) else None
    family = "head" if site.kind == "head" else "linear"
    for name, dtype in LOW_DTYPES.items():
        for what, predicted in _low(site, weight, bias, dtype).items():
            text = f"{what} rounded to {name} on this side"
            yield Attempt(
                hypothesis=Hypothesis(
                    cause=f"{family}.dtype",
                    grid=True,
                    parameters={"dtype": name, "what": what},
                    evidence=(text,),
                ),
                predicted=predicted,
            )
    yield from _other_weight(site, weight, bias)


def weight_of(layer: nn.Module) -> Tensor | None:
    """``[out, in]`` of a linear layer, also of GPT-2's transposed one."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    weight = weight.detach().double()
    return weight.T if type(layer).__name__ == "Conv1D" else weight


def _inputs(site: Site) -> list[Tensor]:
    found = [site.given(trace) for trace in site.usable()]
    return [x for x in found if x is not None]


def _low(
    site: Site, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> dict[str, tuple[Tensor, ...]]:
    xs = _inputs(site)

    def run(x: Tensor, w: Tensor) -> Tensor:
        out = x @ w.T
        return out if bias is None else out + bias

    low = rounded(weight, dtype)
    return {
        "input and weight are": tuple(run(rounded(x, dtype), low) for x in xs),
        "input, weight and result are": tuple(rounded(run(rounded(x, dtype), low), dtype) for x in xs),
        "the result is": tuple(rounded(run(x, weight), dtype) for x in xs),
        "the weight is": tuple(run(x, low) for x in xs),
        "the input is": tuple(run(rounded(x, dtype), weight) for x in xs),
    }


def has_rows_for_a_weight(site: Site) -> bool:
    """Enough rows that another weight, if there were one, had been found by ``linear_attempts``."""
    known = [rows[2] for rows in map(site.rows, site.usable()) if rows is not None]
    width = max((x.shape[1] for x in _inputs(site)), default=0)
    use = sum(int((mask & (torch.arange(len(mask)) % 8 != 0)).sum()) for mask in known)
    return use > width


def _other_weight(site: Site, weight: Tensor, bias: Tensor | None) -> Iterator[Attempt]:
    """Another weight: found from all rows but every eighth, and tried on those."""
    xs, errors, knowns = _inputs(site), [], []
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        errors.append(rows[1] - rows[0])
        knowns.append(rows[2])
    x, error, known = torch.cat(xs), torch.cat(errors), torch.cat(knowns)
    known = known & torch.isfinite(x).all(-1) & torch.isfinite(error).all(-1)
    use = known & (torch.arange(len(x)) % 8 != 0)
    rank = _rank(error[known])
    if int(use.sum()) > x.shape[1]:
        delta = torch.linalg.lstsq(x[use], error[use]).solution.T
        held = known & ~use
        left = float((x[held] @ delta.T - error[held]).norm() / error[held].norm().clamp_min(1e-30))
        if left > _HELD_OUT:
            return
        predicted = tuple(_apply(t, weight + delta, bias) for t in xs)
        text = "another weight than the recorded one explains all rows, also those that it was not fitted to"
        where = f"the difference has rank {rank} of {min(weight.shape)}"
        size = f"‖ΔW‖ / ‖W‖ = {float(delta.norm() / weight.norm()):.3g}"
        cause = "weights.cached_copy"
        if site.kind == "head" and rank < min(weight.shape) // 2:
            cause = "head.adapter"
        yield Attempt(
            hypothesis=Hypothesis(
                cause=cause, parameters={"rank": float(rank)}, evidence=(text, f"{where}; {size}"), grid=True
            ),
            predicted=predicted,
        )


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x @ weight.T
    return out if bias is None else out + bias


def _rank(rows: Tensor) -> int:
    values = torch.linalg.svdvals(rows)
    return int((values > 1e-3 * values.max().clamp_min(1e-30)).sum())


def adapter_attempts(site: Site, factors: tuple[Tensor, Tensor, float] | None) -> Iterator[Attempt]:
    """An adapter in the side's output more or less often than it should be.

    Args:
        site: A linear layer.
        factors: A ``[r, in]``, B ``[out, r]`` and the scaling that it should have.
    """
    if factors is None:
        return
    a, b, scaling = factors
    base, delta, captured = [], [], []
    xs = _inputs(site)
    for x, trace in zip(xs, site.usable(), strict=True):
        rows = site.rows(trace)
        assert rows is not None
        base.append(rows[0][rows[2]])
        captured.append(rows[1][rows[2]])
        delta.append((scaling * (x @ a.T) @ b.T)[rows[2]])
    factor, rest = rank_one_scale(
        torch.cat(base).numpy(), torch.cat(delta).numpy(), torch.cat(captured).numpy()
    )
    text = f"the output holds {1 + factor:.4g} times the adapter (residual {rest:.2g})"
    cause = "weights.adapter_missing" if abs(1 + factor) < 1e-3 else "weights.adapter_scale"
    if site.kind == "head":
        cause = "head.adapter"
    predicted = tuple(
        r[0] + factor * scaling * (x @ a.T) @ b.T
        for x, r in ((x, site.rows(t)) for x, t in zip(xs, site.usable(), strict=True))
        if r is not None
    )
    yield Attempt(
        hypothesis=Hypothesis(cause=cause, parameters={"factor": 1 + factor}, evidence=(text,)),
        predicted=predicted,
    )


def router_attempts(site: Site) -> Iterator[Attempt]:
    """A router in a low precision."""
    weight = weight_of(site.layer)
    if weight is None:
        return
    for name, dtype in LOW_DTYPES.items():
        for what, predicted in _low(site, weight, None, dtype).items():
            rows = [site.rows(trace) for trace in site.usable()]
            if any(r is None or r[0].shape != p.shape for r, p in zip(rows, predicted, strict=True)):
                return
            yield Attempt(
                hypothesis=Hypothesis(
                    cause="moe.routing",
                    parameters={"dtype": name, "what": what},
                    evidence=(f"the router's logits: {what} rounded to {name} on this side",),
                    grid=True,
                ),
                predicted=predicted,
            )


def scaled_attempts(site: Site) -> Iterator[Attempt]:
    """The whole output times one number: an embedding's or a router's scale, a multiplier left out."""
    computed, captured = [], []
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        computed.append(rows[0][rows[2]])
        captured.append(rows[1][rows[2]])
    if not computed:
        return
    factor, rest = common_factor(torch.cat(computed).numpy(), torch.cat(captured).numpy())
    text = f"all elements are {factor:.6g} times what they should be (residual {rest:.2g})"
    yield Attempt(
        hypothesis=Hypothesis(cause="module.scaled", parameters={"factor": factor}, evidence=(text,)),
        predicted=tuple(factor * r[0] for r in map(site.rows, site.usable()) if r is not None),
    )


def dropout_attempts(site: Site) -> Iterator[Attempt]:
    """Elements that are 0, the others larger by one factor."""
    shares: list[tuple[float, float]] = []
    predicted: list[Tensor] = []
    for trace in site.usable():
        rows = site.rows(trace)
        assert rows is not None
        computed, captured, known = rows
        found = dropped(computed[known].numpy(), captured[known].numpy(), site.floor)
        if found is None:
            return
        shares.append(found)
        predicted.append(torch.where(captured == 0, captured, computed * found[1]))
    if not shares:
        return
    share, factor = np.mean(np.array(shares), axis=0).tolist()
    evidence = (
        f"{share:.1%} of the elements are 0 and the others {factor:.4g} times what they should be: dropout with "
        f"p = {1 - 1 / factor:.3g}",
    )
    yield Attempt(
        hypothesis=Hypothesis(
            cause="mode.dropout", parameters={"p": 1 - 1 / factor, "zeros": share}, evidence=evidence
        ),
        predicted=tuple(predicted),
    )
