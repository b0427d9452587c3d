"""Stepwise search: the choice of the next layer to cut, and of the number of ranks.

A method is a generator. It changes the ranks of a `Search` step by step and yields submodels, each
as ranks and loss. A layer moves down a ladder of ranks: each is about a tenth below the last and
costs less. The highest ranks cost as much as the dense form, so the first step skips them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from maestro_lod.errors import OptionError
from maestro_lod.files.stage_cache import Answers
from maestro_lod.model.cost import Costs
from maestro_lod.sizes.replay import Replay

Submodel: TypeAlias = tuple[dict[str, int], float]
"""Ranks, and the loss at these ranks."""
Step: TypeAlias = tuple[str, int]
"""A layer and a lower rank for it."""


@dataclass
class Search:
    """The state of a search: current ranks and loss, costs, and evaluation."""

    replay: Replay
    costs: Costs
    cost: Literal["macs", "params"]
    step: float
    answers: Answers
    ladders: dict[str, list[int]] = field(init=False)
    """The ranks of each layer, from the stored one down."""
    tell: Callable[[float], object] = lambda share: None
    """Takes the finished share of a search that knows how many evaluations it needs."""

    def __post_init__(self) -> None:
        self.ladders = {
            name: rank_ladder(self, name, rank, self.step) for name, rank in self.ranks.items()
        }

    @property
    def ranks(self) -> dict[str, int]:
        return self.replay.ranks

    @property
    def loss(self) -> float:
        return self.replay.loss

    def evaluate(self, changes: Mapping[str, int]) -> float:
        """Return the loss with some ranks changed."""
        return self.answers.answer(
            {"loss at": dict(changes)}, lambda: self.replay.evaluate(changes)
        )

    def accept(self, changes: Mapping[str, int], loss: float) -> None:
        """Change the current ranks."""
        self.replay.accept(changes, loss)

    @property
    def current(self) -> Submodel:
        """The submodel at the current ranks."""
        return dict(self.ranks), self.loss

    def saved(self, name: str, rank: int) -> int:
        """Return the saving of a layer at a rank, in the searched cost."""
        dense, current = self.costs.layer(name, rank, "dense"), self.costs.layer(name, rank)
        saved: int = getattr(dense - current, self.cost)
        return saved

    def gain(self, step: Step) -> int:
        """Return the additional saving of a step."""
        name, rank = step
        return self.saved(name, rank) - self.saved(name, self.ranks[name])

    def spent(self, ranks: Mapping[str, int]) -> int:
        """Return the searched cost of the model at some ranks."""
        spent: int = getattr(self.costs.at(ranks), self.cost)
        return spent

    @property
    def dense(self) -> int:
        """The searched cost of the dense model."""
        dense: int = getattr(self.costs.dense, self.cost)
        return dense

    def share(self, ranks: Mapping[str, int]) -> float:
        """Return the searched cost, relative to the dense model's."""
        return self.spent(ranks) / max(1, self.dense)

    def in_order_of_use(self) -> list[str]:
        """Return the layers in the order in which the model uses them."""
        return sorted(self.ladders, key=self.replay.first_use)


def rank_ladder(search: Search, name: str, rank: int, step: float) -> list[int]:
    """Return the ranks of a layer from one down, each a share below the last, and cheaper."""
    ladder = [rank]
    while rank > 1:
        saved, rank = search.saved(name, rank), min(_less(rank, step), rank - 1)
        while rank >= 1 and search.saved(name, rank) <= saved:
            rank -= 1
        if rank >= 1:
            ladder.append(rank)
    return ladder


def _less(rank: int, step: float) -> int:
    return math.floor((1.0 - step) * rank + 1e-9)  # 0.7 · 90 is a little less than 63


_ALIKE = 0.01  # differences below this share of the full model's loss count as chance


@dataclass
class Greedy:
    """Search that takes the step with the least rise of the loss or, with `ahead`, per saved cost.

    A step is one rung of a layer's ladder or, with `ahead`, any number of them: the first rungs
    below break-even raise the loss and save almost nothing, which hides that the next ones are
    cheap. Such steps are long, so submodels that were measured between are yielded too. While the
    loss is about that of the full model, its differences are chance and long steps risky: until it
    rises, `ahead` takes single rungs with the least rise of the loss too.

    With `exact` all steps are evaluated before each move. Otherwise only those that may be best: an
    older rise of the loss is reduced with every move since its measurement, to zero after half as
    many moves as there are layers.
    """

    search: Search
    ahead: bool
    exact: bool
    losses: dict[Step, float] = field(default_factory=dict)
    """Losses that were measured for this move."""
    increases: dict[str, dict[int, float]] = field(default_factory=dict)
    """The rises over the current loss, by layer and rank, also of earlier moves."""
    measured: dict[str, int] = field(default_factory=dict)
    """The move of the last measurement of each layer."""
    move: int = 0

    def submodels(self) -> Iterator[Submodel]:
        """Yield submodels while some step has a finite loss."""
        self.waiting = self.ahead
        alike = self.search.loss + _ALIKE * abs(self.search.loss)
        while open_steps := self._open_steps():
            best = self._best(open_steps)
            if self.waiting and self.losses[best] > alike:
                self.waiting = False
            elif math.isinf(self.losses[best]):
                return
            else:
                yield from self._take(best)

    def _open_steps(self) -> dict[str, list[int]]:
        """Return the possible next ranks of each layer that has any."""
        ranks = self.search.ranks
        lower = {n: [r for r in rungs if r < ranks[n]] for n, rungs in self.search.ladders.items()}
        most = None if self.ahead and not self.waiting else 1
        return {name: rungs[:most] for name, rungs in lower.items() if rungs}

    def _best(self, open_steps: Mapping[str, list[int]]) -> Step:
        """Return the step to take, after measuring the candidates for it."""
        for name in self.search.in_order_of_use():
            for rank in open_steps.get(name, ()):
                if self.exact or rank not in self.increases.get(name, ()):
                    self._measure(name, rank)
        candidates = [(name, rank) for name, ranks in open_steps.items() for rank in ranks]
        while (best := min(candidates, key=self._hoped_for)) not in self.losses:
            self._measure(*best)
        return best

    def _measure(self, name: str, rank: int) -> None:
        loss = self.losses[name, rank] = self.search.evaluate({name: rank})
        self.increases.setdefault(name, {})[rank] = loss - self.search.loss
        self.measured[name] = self.move

    def _hoped_for(self, step: Step) -> tuple[float, int]:
        name, rank = step
        score, saves = self.increases[name][rank], 0
        if self.ahead and not self.waiting:
            saves = self.search.gain(step)
            score = max(0.0, score) / saves
        if score > 0.0:  # it stays above zero, to keep the order among a layer's steps
            trusted = len(self.search.ladders) / 2
            score *= max(1.0 - (self.move - self.measured[name]) / trusted, 1e-9)
        return score, -saves

    def _take(self, step: Step) -> Iterator[Submodel]:
        if self.ahead and not self.waiting:
            yield from _measured_between(self.search, self.losses, step)
        name, rank = step
        base = self.increases[name][rank]
        self.increases[name] = {r: value - base for r, value in self.increases[name].items()}
        self.search.accept({name: rank}, self.losses[step])
        self.losses.clear()
        self.move += 1
        yield self.search.current


def _measured_between(search: Search, losses: Mapping[Step, float], best: Step) -> list[Submodel]:
    """Return the submodels between the current one and the best step that have a lower loss."""
    submodels: list[Submodel] = []
    lowest = losses[best]
    for step in sorted(losses, key=lambda step: (-search.gain(step), losses[step])):
        if search.gain(step) < search.gain(best) and losses[step] < lowest:
            lowest = losses[step]
            submodels.append(({**search.ranks, step[0]: step[1]}, lowest))
    return submodels[::-1]


def at_given_ranks(search: Search, maps: Iterable[Mapping[str, int]]) -> Iterator[Submodel]:
    """Evaluate a sequence of ranks."""
    for i, ranks in enumerate(maps):
        loss = search.evaluate(ranks)
        if math.isinf(loss):
            raise OptionError(f"the loss at ranks[{i}] is NaN or infinite. Leave that mapping out.")
        search.accept(ranks, loss)
        yield search.current


STEPWISE: dict[str, Callable[[Search, bool], Iterator[Submodel]]] = {
    "look-ahead": lambda search, exact: Greedy(search, ahead=True, exact=exact).submodels(),
    "greedy": lambda search, exact: Greedy(search, ahead=False, exact=exact).submodels(),
}
