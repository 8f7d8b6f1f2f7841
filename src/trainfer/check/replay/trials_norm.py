"""Assumptions about normalisations: another eps, another precision, another order of casts.

Takes a site of kind ``norm``; gives attempts. An RMS norm is y = x / sqrt(mean x² + eps) · w; what differs between
implementations is eps, where the mean is rounded, and whether the quotient is rounded before it meets the weight.
"""
# pyright: standard

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfer.check.replay.hypotheses import Hypothesis, eps_of_rows, eps_outside_of_rows, round_eps
from trainfer.check.replay.trials_sites import LOW_DTYPES, TORCH_DTYPES, Attempt, Site, rounded


def norm_attempts(site: Site) -> Iterator[Attempt]:
    """What may be otherwise in a normalisation."""
    facts = norm_facts(site)
    if facts is None:
        return
    yield from _eps(site, facts)
    yield from _precision(site, facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormFacts:
    """What a norm computes: (x − mean x, where ``centred``) / sqrt(mean x² + eps) · weight + bias.

    Axes: W features.
    """

    weight_W: Tensor
    """As it multiplies: Gemma's is one more than stored."""
    bias_W: Tensor
    """Zeros without one."""
    eps: float
    centred: bool

    def apply(
        self,
        x_TD: Tensor,
        *,
        eps: float | None = None,
        outside: bool = False,
        root: Callable[[Tensor], Tensor] = lambda root: root,
        quotient: Callable[[Tensor], Tensor] = lambda quotient: quotient,
    ) -> Tensor:
        """In float64, over groups of the weight's width (a head's norm runs over heads side by side).

        Args:
            x_TD: What the norm is given.
            eps: In the place of its own.
            outside: Added to the root, not under it.
            root: What becomes of 1 / root before it multiplies.
            quotient: What becomes of the quotient before it meets the weight.
        """
        own = self.eps if eps is None else eps
        x = x_TD.reshape(len(x_TD), -1, len(self.weight_W))
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        square = x.square().mean(-1, keepdim=True)
        size = square.sqrt() + own if outside else (square + own).sqrt()
        return (quotient(x * root(1 / size)) * self.weight_W + self.bias_W).reshape(x_TD.shape)


def norm_facts(site: Site) -> NormFacts | None:
    """None where the module is not such a norm."""
    layer, trace = site.layer, site.traces[0]
    x = site.given(trace)
    rows = site.rows(trace)
    eps = eps_of(layer)
    if x is None or rows is None or eps is None or x.shape != rows[0].shape:
        return None
    raw = getattr(layer, "weight", None)
    width = raw.numel() if isinstance(raw, Tensor) else x.shape[1]
    if x.shape[1] % width:
        return None
    plain = torch.ones(width, dtype=torch.float64) if raw is None else raw.detach().double()
    raw = getattr(layer, "bias", None)
    bias = raw.detach().double() if isinstance(raw, Tensor) else torch.zeros_like(plain)
    for weight in (plain, 1 + plain):
        for centred in (False, True):
            found = NormFacts(weight_W=weight, bias_W=bias, eps=eps, centred=centred)
            y = found.apply(x)
            off = torch.linalg.vector_norm(y - rows[0]) / torch.linalg.vector_norm(rows[0]).clamp_min(1e-30)
            if float(off) < 1e-5:
                return found
    return None


def eps_of(layer: object) -> float | None:
    """A norm's eps, under the names in use."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(layer, name, None)
        if isinstance(value, float):
            return value
    return None


def _predict(site: Site, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for trace in site.usable():
        x = site.given(trace)
        assert x is not None
        found.append(function(x))
    return tuple(found)


def _eps(site: Site, facts: NormFacts) -> Iterator[Attempt]:
    weight, eps = facts.weight_W, facts.eps
    xs, ys = [], []
    for trace in site.usable():
        x, rows = site.given(trace), site.rows(trace)
        assert x is not None
        assert rows is not None
        xs.append(x[rows[2]].reshape(-1, len(weight)))
        ys.append(rows[1][rows[2]].reshape(-1, len(weight)) - facts.bias_W)
    x, y = torch.cat(xs), torch.cat(ys)
    x = x - x.mean(-1, keepdim=True) if facts.centred else x
    fit = eps_of_rows(x.numpy(), y.numpy(), weight.numpy())
    if fit is None:
        return
    said = eps_of(_Attributes(site))
    known = [] if said is None or said == eps else [said]
    text = f"each row is one multiple of what it should be (residual {fit[1]:.2g}); the multiples imply eps {fit[0]:.4g}"
    for value in dict.fromkeys([*known, *round_eps(fit[0])]):
        if value == eps:
            continue
        evidence = (text, f"eps {value:.3g} on this side, {eps:.3g} in the reference")
        yield Attempt(
            hypothesis=Hypothesis(
                cause="norm.eps", parameters={"eps": value, "reference_eps": eps}, evidence=evidence
            ),
            predicted=_predict(site, lambda t, v=value: facts.apply(t, eps=v)),
        )
    beside = eps_outside_of_rows(x.numpy(), y.numpy(), weight.numpy())
    others: list[float] = [] if beside is None else round_eps(beside)
    for value in [eps, *others]:
        evidence = (f"eps {value:.3g} is added to the root, in the reference {eps:.3g} under it",)
        yield Attempt(
            hypothesis=Hypothesis(
                cause="norm.eps",
                parameters={"eps": value, "reference_eps": eps, "where": "outside"},
                evidence=evidence,
            ),
            predicted=_predict(site, lambda t, v=value: facts.apply(t, eps=v, outside=True)),
        )


class _Attributes:
    """A manifest's attributes as an object's."""

    def __init__(self, site: Site) -> None:
        for name, value in site.attributes.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                setattr(self, name, float(value))


def _precision(site: Site, facts: NormFacts) -> Iterator[Attempt]:
    for name, dtype in LOW_DTYPES.items():
        out = TORCH_DTYPES.get(site.dtype, torch.float64)

        def low(values: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return rounded(values, dtype)

        variants: dict[str, Callable[[Tensor], Tensor]] = {
            "all of it": lambda t, d=dtype: low_norm(t, facts, d),
            "the mean of squares": lambda t, d=dtype: low_mean(t, facts, d),
            "its input": lambda t, low=low: facts.apply(low(t)),
            "its result": lambda t, low=low: low(facts.apply(t)),
            "its input and result": lambda t, low=low: low(facts.apply(low(t))),
            "the root": lambda t, low=low: facts.apply(t, root=low),
            "the quotient, before the weight": lambda t, low=low: facts.apply(t, quotient=low),
        }
        if out == dtype:
            variants = {key: variants[key] for key in ("all of it", "the mean of squares", "the root")}
        for what, function in variants.items():
            yield Attempt(
                hypothesis=Hypothesis(
                    cause="norm.precision",
                    grid=True,
                    parameters={"dtype": name, "what": what},
                    evidence=(f"{what} is rounded to {name} on this side",),
                ),
                predicted=_predict(site, function),
            )


def low_norm(x_TD: Tensor, facts: NormFacts, dtype: torch.dtype) -> Tensor:
    """Every step in a low precision."""
    x = x_TD.to(dtype).reshape(len(x_TD), -1, len(facts.weight_W))
    x = x - x.mean(-1, keepdim=True) if facts.centred else x
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + facts.eps)
    return (facts.weight_W.to(dtype) * (x * scale) + facts.bias_W.to(dtype)).double().reshape(x_TD.shape)


def low_mean(x_TD: Tensor, facts: NormFacts, dtype: torch.dtype) -> Tensor:
    """The mean of squares in a low precision, the rest not."""
    x = x_TD.reshape(len(x_TD), -1, len(facts.weight_W))
    x = x - x.mean(-1, keepdim=True) if facts.centred else x
    square = x.to(dtype).pow(2).mean(-1, keepdim=True).double()
    return (x * torch.rsqrt(square + facts.eps) * facts.weight_W + facts.bias_W).reshape(x_TD.shape)


def cast_variants(x_TD: Tensor, weight_W: Tensor, eps: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """The two orders of casts in use, as they come out in a low precision."""
    x = x_TD.float().reshape(len(x_TD), -1, len(weight_W))
    quotient = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = weight_W.to(dtype)
    return {
        "the quotient is rounded, then multiplied by the weight": (weight * quotient.to(dtype)).reshape(x_TD.shape),
        "multiplied by the weight in float32, then rounded": (weight_W.float() * quotient).to(dtype).reshape(x_TD.shape),
    }  # fmt: skip
