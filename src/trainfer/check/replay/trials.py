"""Undoes assumed causes one by one and looks what becomes of the difference.

Takes two sides put together, the model and what the replay measured; gives trials: for the first module that introduces
more than its floor every assumption that its maths allows is made, the one that reproduces the side's captured values
best is kept, extended to all modules of the same kind in which it holds too, and grafted on the model, so that its share
of |Δ log p| is known. Then the next module, until all that is left is inside the floors: stacked causes come out in order.
"""
# pyright: standard
# (the bench holds modules, which torch does not type)

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from trainfer.check.compare.joined import JoinedSides
from trainfer.check.replay.records import ModuleReplay, Replay, Trial
from trainfer.check.replay.suspects import Suspect, behind_caches, low_norms, suspects_of
from trainfer.check.replay.trials_bench import SIDES, Bench, Graft
from trainfer.check.replay.trials_grafts import (
    adapter_of,
    behind_a_cache,
    graft_of,
    graft_to,
    tokens_of,
)
from trainfer.check.replay.trials_layers import attention_facts
from trainfer.check.replay.trials_linear import (
    adapter_attempts,
    dropout_attempts,
    has_rows_for_a_weight,
    linear_attempts,
    router_attempts,
    scaled_attempts,
)
from trainfer.check.replay.trials_norm import norm_attempts
from trainfer.check.replay.trials_rope import learned_attempts, rope_attempts
from trainfer.check.replay.trials_rounding import CastOrder, cast_order
from trainfer.check.replay.trials_scores import attention_attempts
from trainfer.check.replay.trials_sites import Attempt, Outcome, Site, errors, relative, weigh

MAX_CAUSES = 8
"""Confirmed or unknown, before the search gives up."""
MAX_SITES = 96


def find_causes(joined: JoinedSides, model: nn.Module, replay: Replay) -> Replay:
    """Trials for everything that the replay found above its floors.

    Args:
        joined: Both sides.
        model: The reference.
        replay: What was introduced where.

    Returns:
        The same replay with ``trials`` and ``remaining``.
    """
    suspects = suspects_of(replay)
    norms = low_norms(replay)
    if not (suspects or norms or replay.not_replayed) or not joined.tokens.sequences[0]:
        return replay
    bench = Bench(joined, model)
    suspects = sorted([*suspects, *behind_caches(replay, bench)], key=lambda item: replay.order[item.module])
    if not (suspects or norms):
        return replay
    search = Search(bench, suspects)
    trials = [*search.run(), *search.run_norms(norms)]
    return replace(replay, trials=tuple(trials), remaining=search.remaining)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Best:
    outcome: Outcome
    attempt: Attempt
    site: Site


class Search:
    """One search through the suspects."""

    def __init__(self, bench: Bench, suspects: list[Suspect]) -> None:
        self.bench = bench
        self.left = suspects[:MAX_SITES]
        self.grafts: tuple[list[Graft], list[Graft]] = ([], [])
        self.before = self._difference()
        self.remaining = self._mean(self.before)

    def run(self) -> Iterator[Trial]:
        """Trials until nothing is left."""
        count = 0
        while self.left and count < MAX_CAUSES:
            suspect = self.left.pop(0)
            trial = self._explain(suspect)
            if trial is not None:
                count += 1
                yield trial

    def _explain(self, suspect: Suspect) -> Trial | None:
        site = self.bench.site(suspect.module, suspect.side, suspect.floor)
        if site is None or not site.usable():
            return None
        best, rejected = self._try(site)
        if best is None:
            return self._unknown(site, rejected)
        group = [best, *self._same_elsewhere(best, suspect.side)]
        for item in group:
            exact = None if item.attempt.hypothesis.grid else item.attempt
            self.grafts[suspect.side].append(graft_of(item.site, exact))
        return Trial(
            cause=best.outcome.hypothesis.cause,
            module=site.module,
            side=site.side,
            parameters=best.outcome.hypothesis.parameters,
            reproduced=True,
            error_before=best.outcome.before,
            error_after=best.outcome.after,
            share_explained=self._share(),
            modules=tuple(item.site.module for item in group),
            evidence=best.outcome.hypothesis.evidence,
            rejected=rejected,
            tokens=tokens_of(site),
            floor=site.floor,
        )

    def run_norms(self, norms: Sequence[ModuleReplay]) -> Iterator[Trial]:
        """One trial where both sides round at another place in their normalisations."""
        found: list[tuple[Site, CastOrder, Graft]] = []
        for item in norms[:MAX_SITES]:
            sites = [self.bench.site(item.module, side, item.floors[side].value) for side in (0, 1)]
            if sites[0] is None or sites[1] is None or not sites[0].usable() or not sites[1].usable():
                continue
            order = cast_order(sites[0], sites[1])
            if order is not None:
                found.append((sites[0], order, graft_to(sites[0], order.other)))
        if not found:
            return
        self.grafts[0].extend(graft for _, _, graft in found)
        site, order, _ = found[0]
        worst = float(errors(site).max(initial=0.0))
        yield Trial(
            cause="norm.cast_order",
            module=site.module,
            side=site.side,
            parameters={"rollout": order.names[0], "train": order.names[1]},
            reproduced=True,
            error_before=worst,
            error_after=worst,
            share_explained=self._share(),
            modules=tuple(item[0].module for item in found),
            evidence=order.evidence,
            floor=site.floor,
        )

    def _try(self, site: Site, only: str | None = None) -> tuple[_Best | None, tuple[tuple[str, float], ...]]:
        best: _Best | None = None
        fallen: dict[str, float] = {}
        for attempt in self._attempts(site):
            cause = attempt.hypothesis.cause
            if only is not None and cause != only:
                continue
            outcome = weigh(site, attempt)
            if not outcome.reproduced:
                fallen[cause] = min(outcome.spread, fallen.get(cause, np.inf))
            elif best is None or outcome.spread < 0.5 * best.outcome.spread:
                best = _Best(outcome=outcome, attempt=attempt, site=site)
            if best is not None and best.outcome.spread < 1e-6:
                break
        if best is not None:
            fallen.pop(best.outcome.hypothesis.cause, None)
        return best, tuple(sorted(fallen.items(), key=lambda item: item[1]))

    def _attempts(self, site: Site) -> Iterable[Attempt]:
        match site.kind:
            case "norm":
                yield from norm_attempts(site)
            case "rotary":
                yield from rope_attempts(site)
            case "embedding":
                yield from learned_attempts(site)
            case "attention":
                facts = attention_facts(self.bench, site)
                if facts is not None:
                    yield from attention_attempts(site, facts)
            case "linear" | "head":
                yield from adapter_attempts(site, adapter_of(site.layer))
                yield from linear_attempts(site)
            case "router":
                yield from router_attempts(site)
            case _:
                pass
        yield from dropout_attempts(site)
        yield from scaled_attempts(site)

    def _same_elsewhere(self, found: _Best, side: int) -> list[_Best]:
        """Other suspects of the same kind and side in which the same cause reproduces with the same parameters."""
        group: list[_Best] = []
        for suspect in list(self.left):
            if suspect.side != side or self.bench.kind(suspect.module) != found.site.kind:
                continue
            site = self.bench.site(suspect.module, side, suspect.floor)
            if site is None or not site.usable():
                continue
            best, _ = self._try(site, only=found.outcome.hypothesis.cause)
            if best is not None:
                group.append(best)
                self.left.remove(suspect)
        return group

    def _unknown(self, site: Site, rejected: tuple[tuple[str, float], ...]) -> Trial:
        """Nothing reproduces; the place itself, or the rows, may still leave one cause only."""
        side = SIDES.index(site.side)
        cause, evidence = self._by_exclusion(site)
        self.grafts[side].append(graft_of(site, None))
        found = [
            relative(rows[1], rows[0])[rows[2].numpy()] for rows in map(site.rows, site.usable()) if rows
        ]
        worst = max((float(error.max(initial=0.0)) for error in found), default=0.0)
        return Trial(
            cause=cause,
            module=site.module,
            side=site.side,
            parameters={"kind": site.kind},
            evidence=evidence,
            reproduced=False,
            error_before=worst,
            error_after=worst,
            share_explained=self._share(),
            modules=(site.module,),
            rejected=rejected,
            tokens=tokens_of(site),
            floor=site.floor,
        )

    def _by_exclusion(self, site: Site) -> tuple[str, tuple[str, ...]]:
        if site.kind == "router" or self.bench.has_router(site.module):
            text = "a router, or what it chose, differs by itself: experts or their weights are not the reference's"
            return "moe.routing", (text,)
        rates = {name: value for name, value in site.attributes.items() if _is_dropout(name, value)}
        if site.training and rates:
            name, rate = next(iter(rates.items()))
            return "mode.dropout", (
                f"it runs in training mode with {name}={rate}, and no other assumption holds",
            )
        if site.kind == "attention":
            facts = attention_facts(self.bench, site)
            stale = None if facts is None else behind_a_cache(site, facts)
            if stale is not None:
                return "kv_cache.stale_prefix", (stale,)
        if site.kind in ("linear", "head") and not has_rows_for_a_weight(site):
            text = (
                "its weight is the recorded one and no precision explains it: it computes with another copy"
            )
            return "weights.cached_copy", (text,)
        return "module.unknown", ()

    def _share(self) -> float | None:
        """What the last graft took from the mean |Δ log p|, as a share of all of it."""
        if self.remaining is None:
            return None
        whole, before = self._mean(self.before), self.remaining
        effects = [self._effect(side) for side in (0, 1)]
        self.remaining = self._mean(self.before + effects[0] - effects[1])
        if not whole or self.remaining is None:
            return None
        return max(0.0, min(1.0, (before - self.remaining) / whole))

    def _difference(self) -> NDArray[np.float64]:
        """Recorded train − rollout, token after token of all sequences of the bench."""
        parts: list[NDArray[np.float64]] = []
        for rollout, train in self.bench.records.values():
            a, b = (np.array([float(v) for v in r.logprobs]) for r in (rollout, train))
            parts.append(b - a if len(a) == len(b) else np.empty(0))
        return np.concatenate([np.empty(0), *parts])

    def _effect(self, side: int) -> NDArray[np.float64]:
        """What the grafts of one side do to its log-probs."""
        parts: list[NDArray[np.float64]] = []
        for label, (rollout, train) in self.bench.records.items():
            if len(rollout.logprobs) != len(train.logprobs):
                continue
            clean = self.bench.logprobs(label, ())
            changed = self.bench.logprobs(label, self.grafts[side])
            parts.append((changed - clean).numpy()[: len(rollout.logprobs)])
        return np.concatenate([np.empty(0), *parts])

    @staticmethod
    def _mean(values: NDArray[np.float64]) -> float | None:
        usable = values[np.isfinite(values)]
        return float(np.mean(np.abs(usable))) if len(usable) else None


def _is_dropout(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0
