"""Measured search: allocations for a ladder of limits, improved by measuring.

A search that cuts step by step evaluates many submodels for each size. This one measures how much
loss each layer alone adds at a few ranks, allocates the ranks of all sizes from these curves, and
evaluates each size once. The curves describe cuts of the whole model. Where much is cut already,
layers matter differently, so the curves are measured again at one to three smaller sizes.
From then on each limit has up to three candidates: the first allocation, the one of the newer
curves, and the last size with the steps that add the least loss per saved cost. The best one is
kept. With few layers, exchanges of ranks between two layers are tried at common limits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.sizes.measured_allocation import MOST_LOSS, loss_curve, nested_ranks
from maestro_lod.sizes.rank_order import lost_energy
from maestro_lod.sizes.strategies import Search, Submodel, rank_ladder


class _Effort(NamedTuple):
    """Ranks and sizes to measure, as shares: few ranks of each layer if there are many layers."""

    first: tuple[float, ...]
    """Ranks of layers of the whole model, relative to the largest rank that saves anything."""
    again: tuple[float, ...]
    """Ranks of layers of a smaller model, relative to those that they have."""
    anchors: tuple[float, ...]
    """The costs at which layers are measured again, relative to the cost at the stored ranks."""
    exchanges: int
    """How many exchanges of ranks between two layers are tried at each of the common limits."""


_FEW_LAYERS = _Effort((0.04, 0.1, 0.22, 0.45, 0.8), (0.25, 0.5, 0.75), (0.5, 0.33, 0.2), 5)
_MANY_LAYERS = _Effort((0.1, 0.3, 0.7), (0.3, 0.65), (0.35,), 0)
_MANY = 12
_COMMON = (0.75, 0.5, 0.33, 0.25, 0.2, 0.15, 0.1)
"""Shares of the dense cost that are always among the limits."""
_EVENLY, _SPACING = 18, 0.9  # limits besides those, and their least ratio
_LAYERS = 0.3  # of the time, for measuring the layers of the whole model
_STEP = 0.05  # between the ranks that a layer may have


def most_evaluations(layers: int) -> int:
    """Return an upper bound on the evaluations of a measured search."""
    first, again, anchors, exchanges = _effort(layers)
    per_layer = len(first) + 1 + len(anchors) * (len(again) + 1)  # rank 0 too
    return per_layer * layers + 3 * _EVENLY + (3 + exchanges) * len(_COMMON)


def _effort(layers: int) -> _Effort:
    return _FEW_LAYERS if layers < _MANY else _MANY_LAYERS


def measured(search: Search, until: float | None = None) -> Iterator[Submodel]:
    """Yield the best submodel found for each of a ladder of limits, from large to small.

    Args:
        search: The search, at the stored ranks.
        until: The share of the dense cost of the smallest limit; by default the least cost.
    """
    return _Measured(search).submodels(until)


Curves = Mapping[str, Tensor]
"""For each layer the loss that it adds with 0, 1, … ranks."""


@dataclass
class _Measured:
    search: Search
    ladders: dict[str, list[int]] = field(init=False)
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Measured losses, by ranks."""
    finished: float = 0.0
    """The finished share of the search, from the layers and limits that are done."""

    def __post_init__(self) -> None:
        search = self.search
        self.ladders = {n: rank_ladder(search, n, r, _STEP) for n, r in search.ranks.items()}
        layers = low_rank_layers(search.replay.model)
        self.energies = {
            name: -lost_energy(layers[name]).diff() if rank else torch.zeros(0)
            for name, rank in search.ranks.items()
        }
        self.losses[self._key(search.ranks)] = search.loss
        count = sum(len(ladder) > 1 for ladder in self.ladders.values())
        self.effort = _effort(count)

    def submodels(self, until: float | None) -> Iterator[Submodel]:
        whole = dict(self.search.ranks)
        limits = self._limits(until)
        anchors = [share * self.search.spent(whole) for share in self.effort.anchors]
        of_whole = curves = self._curves(self.effort.first, of_savings=True)
        families = [self._allocated(curves, limits)]
        ranks = whole
        for i, limit in enumerate(limits):
            self.finished = _LAYERS + (1.0 - _LAYERS) * i / len(limits)
            if self.search.spent(ranks) <= limit:
                continue
            candidates = [family[limit] for family in families]
            candidates.append(self._cut_further(ranks, curves, limit))
            best = self._best([each for each in candidates if self.search.spent(each) <= limit])
            if best is None:
                continue
            if self.effort.exchanges and limit in self._common_limits():
                exchanged = self._exchanges(best, of_whole, limit)[: self.effort.exchanges]
                best = self._best([best, *exchanged]) or best
            ranks = best
            yield dict(ranks), self._loss(ranks)
            if anchors and self.search.spent(ranks) <= anchors[0] and limits[i + 1 :]:
                anchors = [cost for cost in anchors if cost < self.search.spent(ranks)]
                self.search.accept(ranks, self._loss(ranks))
                curves = self._curves(self.effort.again, of_savings=False)
                families = [families[0], self._allocated(curves, limits[i + 1 :])]

    # -- limits --------------------------------------------------------------------------------

    def _limits(self, until: float | None) -> list[int]:
        """Return falling limits, evenly spaced in the logarithm, with the common shares."""
        search = self.search
        dense, first = search.dense, search.spent(search.ranks)
        least = search.spent({name: ladder[-1] for name, ladder in self.ladders.items()})
        last = max(least, 1, 0 if until is None else math.floor(until * dense))
        if last >= first:
            return []
        count = min(_EVENLY, math.ceil(math.log(last / first) / math.log(_SPACING)))
        even = (int(first * (last / first) ** (i / count)) for i in range(1, count))
        between = (limit for limit in (*even, *self._common_limits()) if last < limit < first)
        return sorted({last, *between}, reverse=True)

    def _common_limits(self) -> list[int]:
        return [int(share * self.search.dense) for share in _COMMON]

    # -- curves --------------------------------------------------------------------------------

    def _curves(self, shares: Sequence[float], *, of_savings: bool) -> Curves:
        """Measure each layer alone at a few of its lower ranks, and interpolate between them.

        Shares are relative to the largest rank that saves anything, or to the current rank.
        """
        curves: dict[str, Tensor] = {}
        for name in self.search.in_order_of_use():
            self.finished = max(self.finished, _LAYERS * len(curves) / len(self.ladders))
            rank = self.search.ranks[name]
            lower = [each for each in self.ladders[name] if each < rank]
            at: set[int] = set()
            if lower:
                most = lower[0] if of_savings else rank
                near = partial(_nearest, lower)
                at = {0, *(near(share * most) for share in shares)}
            curves[name] = loss_curve(
                self.energies[name][:rank], sorted(at), partial(self._added, name)
            )
        return curves

    def _added(self, name: str, rank: int) -> float:
        value = self._loss({**self.search.ranks, name: rank}) - self.search.loss
        return value if math.isfinite(value) else MOST_LOSS

    # -- candidates ----------------------------------------------------------------------------

    def _allocated(self, curves: Curves, limits: Sequence[int]) -> dict[int, dict[str, int]]:
        """Return the best ranks for each limit, none above the current ones."""
        current, search = self.search.ranks, self.search
        choices = {
            name: [rank for rank in reversed(ladder) if rank <= current[name]]
            for name, ladder in self.ladders.items()
        }
        weighed = {name: _weighed(curve) for name, curve in curves.items()}
        found: dict[int, dict[str, int]] = {}
        for limit in limits:
            found |= nested_ranks(
                search.replay.model, search.costs, weighed, [limit], search.cost, choices=choices
            )
        return found

    def _cut_further(self, ranks: Mapping[str, int], curves: Curves, limit: int) -> dict[str, int]:
        """Take the steps that add the least loss per saved cost until a limit is met."""
        cut, cost = dict(ranks), self.search.spent(ranks)
        best = {name: self._next_step(name, rank, curves[name]) for name, rank in cut.items()}
        while cost > limit:
            name = min(best, key=lambda name: best[name][0])
            _, rank = best[name]
            if rank == cut[name]:
                break
            cost -= self.search.saved(name, rank) - self.search.saved(name, cut[name])
            cut[name] = rank
            best[name] = self._next_step(name, rank, curves[name])
        return cut

    def _next_step(self, name: str, rank: int, curve: Tensor) -> tuple[tuple[float, int], int]:
        """Return the best lower rank of a layer, after the loss per saved cost."""

        def added(rank: int) -> float:
            return float(curve[min(rank, len(curve) - 1)])

        before, current = self.search.saved(name, rank), added(rank)
        steps = []
        for lower in self.ladders[name]:
            if lower < rank and (saves := self.search.saved(name, lower) - before) > 0:
                steps.append(((max(0.0, added(lower) - current) / saves, -saves), lower))
        return min(steps, default=((math.inf, 0), rank))

    def _exchanges(
        self, ranks: Mapping[str, int], curves: Curves, limit: int
    ) -> list[dict[str, int]]:
        """Return exchanges within a limit: one layer gets its next higher rank, another fewer.

        Those that the curves expect to add the least loss come first.
        """
        found: list[tuple[float, int, dict[str, int]]] = []
        for more, fewer in itertools.permutations(ranks, 2):
            higher = [rank for rank in self.ladders[more] if rank > ranks[more]]
            for rank in [rank for rank in self.ladders[fewer] if rank < ranks[fewer]]:
                if not higher:
                    break
                exchanged = {**ranks, more: higher[-1], fewer: rank}
                if self.search.spent(exchanged) <= limit:
                    added = sum(
                        float(curves[name][exchanged[name]] - curves[name][ranks[name]])
                        for name in (more, fewer)
                    )
                    found.append((added, len(found), exchanged))
                    break
        return [exchanged for *_, exchanged in sorted(found)]

    def _best(self, candidates: Sequence[dict[str, int]]) -> dict[str, int] | None:
        """Return the ranks with the smallest loss; None if no loss is finite."""
        best = min(candidates, key=self._loss, default=None)
        return best if best is not None and math.isfinite(self._loss(best)) else None

    def _loss(self, ranks: Mapping[str, int]) -> float:
        """Return the loss at some ranks, measured once."""
        key, current = self._key(ranks), self.search.ranks
        if key not in self.losses:
            changes = {name: rank for name, rank in ranks.items() if rank != current[name]}
            self.losses[key] = self.search.evaluate(changes)
            self.search.tell(self.finished)
        return self.losses[key]

    def _key(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(ranks[name] for name in self.ladders)


def _weighed(curve: Tensor) -> Tensor:
    """Return losses that count the more, the nearer they come to the loss without the layer.

    Nothing is trained afterwards, and a model that has lost all of one layer has lost everything:
    the share of the loss that a layer still prevents counts, as its logarithm.
    """
    most = float(curve[0])
    if most <= 0.0:
        return curve
    return -most * torch.log1p(-(curve.double() / most).clamp(max=1 - 1e-12))


def _nearest(ranks: Sequence[int], rank: float) -> int:
    return min(ranks, key=lambda each: abs(each - rank))
