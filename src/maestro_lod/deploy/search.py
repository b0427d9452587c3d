"""Ways to give up ranks: which layer loses some next, and how many.

Each way is a generator. It changes the ranks of a `Search` step by step and yields the submodels
that it comes by, each as ranks and loss. A layer moves down a ladder of ranks, each about a tenth
below the one before and low enough to cost less: what is above break-even is deployed dense, so it
jumps below that first.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from maestro_lod.cost import Costs
from maestro_lod.deploy.journal import Journal
from maestro_lod.deploy.replay import Replay
from maestro_lod.errors import OptionError
from maestro_lod.train.penalty import importance

Submodel: TypeAlias = tuple[dict[str, int], float]
"""Ranks, and the loss there."""


@dataclass
class Search:
    """The ranks and the loss that a search has come to, and what it can ask."""

    replay: Replay
    costs: Costs
    cost: Literal["macs", "params"]
    step: float
    journal: Journal
    ladders: dict[str, list[int]] = field(init=False)
    """The ranks that each layer may have, from the model's own on down."""

    def __post_init__(self) -> None:
        self.ladders = {name: self._ladder(name, rank) for name, rank in self.ranks.items()}

    @property
    def ranks(self) -> dict[str, int]:
        return self.replay.ranks

    @property
    def loss(self) -> float:
        return self.replay.loss

    def evaluate(self, changes: Mapping[str, int]) -> float:
        """Return the loss with some ranks changed."""
        return self.journal.answer(
            {"loss at": dict(changes)}, lambda: self.replay.evaluate(changes)
        )

    def accept(self, changes: Mapping[str, int], loss: float) -> None:
        """Change ranks for good."""
        self.replay.accept(changes, loss)

    @property
    def here(self) -> Submodel:
        """The submodel that the search has come to."""
        return dict(self.ranks), self.loss

    def saved(self, name: str, rank: int) -> int:
        """Return what a layer at a rank saves of the cost that counts."""
        dense, here = self.costs.layer(name, rank, "dense"), self.costs.layer(name, rank)
        saved: int = getattr(dense - here, self.cost)
        return saved

    def gain(self, step: tuple[str, int]) -> int:
        """Return what a layer at a lower rank saves beyond what it saves now."""
        name, rank = step
        return self.saved(name, rank) - self.saved(name, self.ranks[name])

    def share(self, ranks: Mapping[str, int]) -> float:
        """Return the cost that counts, relative to the dense model's."""
        at: int = getattr(self.costs.at(ranks), self.cost)
        dense: int = getattr(self.costs.dense, self.cost)
        return at / max(1, dense)

    def _ladder(self, name: str, rank: int) -> list[int]:
        ladder = [rank]
        while rank > 1:
            saved, rank = self.saved(name, rank), min(_less(rank, self.step), rank - 1)
            while rank >= 1 and self.saved(name, rank) <= saved:
                rank -= 1
            if rank >= 1:
                ladder.append(rank)
        return ladder

    def in_order_of_use(self) -> list[str]:
        """Return the layers as the model uses them: so evaluated, each remembers for the next."""
        return sorted(self.ladders, key=self.replay.first_use)


def _less(rank: int, step: float) -> int:
    return math.floor((1.0 - step) * rank + 1e-9)  # 0.7 · 90 is a little less than 63


_ALIKE = 0.01  # of the model's own loss: differences that are a matter of chance


def greedy(search: Search, *, per_cost: bool, ahead: bool, exact: bool) -> Iterator[Submodel]:
    """Always take the step that raises the loss least, in all or per saved cost.

    A step is one rung of a layer's ladder or, with `ahead`, any number of them: the first rungs
    below break-even cost loss and save almost nothing, and hide that the next ones are cheap. Such
    steps are long, so what was measured for one and lies on the way is a submodel too. But as long
    as the loss is about the model's own, which cut looks best is a matter of chance and a long step
    a bet: until then `ahead` takes single rungs too, those that raise the loss least.

    With `exact` all steps are evaluated before each move. Otherwise only those that may be best: a
    loss increase that was measured some moves ago is trusted less with every move, and taken for
    smaller, down to nothing after half as many moves as there are layers.
    """
    losses: dict[tuple[str, int], float] = {}  # by layer and rank, measured before this move
    increases: dict[str, dict[int, float]] = {}  # the same over the current loss, also older ones
    measured: dict[str, int] = {}  # before which move each layer was measured last
    move, trusted = 0, len(search.ladders) / 2
    waiting, alike = ahead, search.loss + _ALIKE * abs(search.loss)

    def steps(name: str) -> list[int]:
        lower = [rank for rank in search.ladders[name] if rank < search.ranks[name]]
        return lower if ahead and not waiting else lower[:1]

    def measure(name: str, rank: int) -> None:
        losses[name, rank] = search.evaluate({name: rank})
        increases.setdefault(name, {})[rank] = losses[name, rank] - search.loss
        measured[name] = move

    def hoped_for(step: tuple[str, int]) -> tuple[float, int]:
        name, rank = step
        score, saves = increases[name][rank], 0
        if per_cost and not waiting:
            saves = search.gain(step)
            score = max(0.0, score) / saves
        if score > 0.0:  # nothing is left of it in the end but the order among a layer's steps
            score *= max(1.0 - (move - measured[name]) / trusted, 1e-9)
        return score, -saves

    while open_steps := {name: steps(name) for name in search.ladders if steps(name)}:
        for name in search.in_order_of_use():
            for rank in open_steps.get(name, ()):
                if exact or rank not in increases.get(name, ()):
                    measure(name, rank)
        candidates = [(name, rank) for name, ranks in open_steps.items() for rank in ranks]
        while (best := min(candidates, key=hoped_for)) not in losses:
            measure(*best)
        if waiting and losses[best] > alike:
            waiting = False
            continue
        if math.isinf(losses[best]):
            return
        name, rank = best
        if ahead and not waiting:
            yield from _on_the_way(search, losses, best)
        base = increases[name][rank]
        increases[name] = {r: value - base for r, value in increases[name].items()}
        search.accept({name: rank}, losses[best])
        losses.clear()
        move += 1
        yield search.here


def _on_the_way(
    search: Search, losses: Mapping[tuple[str, int], float], best: tuple[str, int]
) -> list[Submodel]:
    """Return the submodels that cost more than the best step leaves, and are better for it."""
    found: list[Submodel] = []
    lowest = losses[best]
    for step in sorted(losses, key=lambda step: (-search.gain(step), losses[step])):
        if search.gain(step) < search.gain(best) and losses[step] < lowest:
            lowest = losses[step]
            found.append(({**search.ranks, step[0]: step[1]}, lowest))
    return found[::-1]


def knapsack(search: Search) -> Iterator[Submodel]:
    """Measure each layer's loss along its ladder, the others untouched; then go down all at once.

    The loss increases of layers are taken to add up. On the lower convex hull of each layer's loss
    over its saved cost, slopes rise, so taking steps in the order of their slopes is optimal.
    """
    steps: list[tuple[float, str, int]] = []
    for name in search.in_order_of_use():
        ladder = search.ladders[name]
        hull = [(search.saved(name, ladder[0]), search.loss, ladder[0])]
        for rank in ladder[1:]:
            point = (search.saved(name, rank), search.evaluate({name: rank}), rank)
            if math.isinf(point[1]):
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
                hull.pop()
            hull.append(point)
        steps += [(_slope(a, b), name, b[2]) for a, b in itertools.pairwise(hull)]
    for _, name, rank in sorted(steps):
        changes = {name: rank}
        loss = search.evaluate(changes)
        if math.isinf(loss):
            return
        search.accept(changes, loss)
        yield search.here


def _slope(a: tuple[int, float, int], b: tuple[int, float, int]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def threshold(search: Search) -> Iterator[Submodel]:
    """Sweep one threshold over the importance of all ranks; each step saves a share of the cost.

    A layer whose remaining ranks would save nothing keeps all: it is deployed dense anyway.
    """
    full = dict(search.ranks)
    rising = {n: v.flip(0).tolist() for n, v in importance(search.replay.model).items()}
    share = search.share(full)
    for limit in sorted({value for values in rising.values() for value in values}):
        ranks = {
            name: max(len(values) - bisect.bisect_right(values, limit), min(1, full[name]))
            for name, values in rising.items()
        }
        for name, rank in ranks.items():
            if search.saved(name, rank) <= search.saved(name, full[name]):
                ranks[name] = full[name]
        if search.share(ranks) > share * (1 - search.step):
            continue
        share, loss = search.share(ranks), search.evaluate(ranks)
        if math.isinf(loss):
            return
        search.accept(ranks, loss)
        yield search.here


def given(search: Search, maps: Iterable[Mapping[str, int]]) -> Iterator[Submodel]:
    """Take these ranks, one mapping after the other."""
    for i, ranks in enumerate(maps):
        loss = search.evaluate(ranks)
        if math.isinf(loss):
            raise OptionError(f"the loss at ranks[{i}] is NaN or infinite. Leave that mapping out.")
        search.accept(ranks, loss)
        yield search.here


METHODS: dict[str, Callable[[Search, bool], Iterator[Submodel]]] = {
    "look-ahead": lambda s, exact: greedy(s, per_cost=True, ahead=True, exact=exact),
    "per-cost": lambda s, exact: greedy(s, per_cost=True, ahead=False, exact=exact),
    "greedy": lambda s, exact: greedy(s, per_cost=False, ahead=False, exact=exact),
    "knapsack": lambda s, _: knapsack(s),
    "threshold": lambda s, _: threshold(s),
}
