"""What a comparison says: mean and spread over seeds, the winner of each size, the best of all.

Everything here follows from the runs alone, so that the same runs always give the same table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import mean, stdev
from typing import Any

from maestro_lod.baselines.compare.metrics import better
from maestro_lod.baselines.compare.words import in_words

_SLACK = 1.005
"""Times a size: what is no larger than this has that size."""

COSTS = ("params", "macs", "bytes", "latency", "training")
"""What quality is held against."""


@dataclass(frozen=True)
class Row:
    """One contender at one size, over all seeds; costs are means."""

    method: str
    size: float | None
    """The share that was asked for; None for a method that has a size of its own."""
    share: float
    params: float
    macs: float
    bytes: float
    training: float
    """MACs of the training, in units of one training of the dense model."""
    seconds: float
    """Of the training, on whatever else the machine was doing."""
    scores: tuple[float, ...]
    """One per seed."""
    runs: tuple[str, ...]
    latency: float | None = None
    """Seconds per call, of the first seed's model."""

    @property
    def mean(self) -> float:
        return mean(self.scores)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None with one seed."""
        return stdev(self.scores) if len(self.scores) > 1 else None

    def cost(self, kind: str) -> float | None:
        value: float | None = getattr(self, kind)
        return value


@dataclass(frozen=True)
class Winner:
    """The best of all models that are no larger than a size, and the best of another method.

    Of two that are tied it is the smaller one.
    """

    size: float
    row: Row
    second: Row | None

    @property
    def ahead(self) -> float | None:
        """By how much it is better."""
        return None if self.second is None else abs(self.row.mean - self.second.mean)

    @property
    def spread(self) -> float | None:
        """The standard deviations of both over seeds, added."""
        if self.second is None or self.row.spread is None or self.second.spread is None:
            return None
        return self.row.spread + self.second.spread

    @property
    def clear(self) -> bool | None:
        """Say whether it is ahead by more than the spread; None where that is not known."""
        if self.ahead is None or self.spread is None:
            return None
        return self.ahead > self.spread

    @property
    def tied(self) -> bool:
        """Whether both are equally good, or not apart by more than the spread."""
        return self.ahead == 0.0 or self.clear is False


@dataclass(frozen=True)
class Comparison:
    """All that was compared."""

    recipe: str
    metric: str
    split: str
    epochs: int
    seeds: int
    budget: float | None
    lr_trials: int
    sizes: tuple[float, ...]
    dense: Mapping[str, float]
    """params, macs and bytes of the dense model."""
    trials: Mapping[str, Mapping[float, float | None]]
    """What each learning rate reached on validation data, by method; None where it failed."""
    paces: Mapping[str, tuple[float, int]]
    """The learning rate and the epochs of each method."""
    rows: tuple[Row, ...]
    missing: tuple[tuple[str, str], ...]
    """What is not there, and why."""

    def __str__(self) -> str:
        return in_words(self)

    def order(self, row: Row) -> float:
        """Return how good a row is, more being better."""
        return better(self.metric, row.mean)

    @property
    def winners(self) -> list[Winner]:
        """Return the winner of each size, from the largest down; sizes that nobody has are out."""
        found = []
        for size in sorted(self.sizes, reverse=True):
            within = [row for row in self.rows if row.share <= size * _SLACK]
            ranked = sorted(within, key=lambda row: (-self.order(row), row.params))
            if ranked:
                others = (row for row in ranked if row.method != ranked[0].method)
                winner = Winner(size, ranked[0], next(others, None))
                if winner.tied and winner.second and winner.second.params < winner.row.params:
                    winner = Winner(size, winner.second, winner.row)
                found.append(winner)
        return found

    def front(self, kind: str) -> list[Row]:
        """Return the rows that none beats in both cost and quality, from the cheapest up."""
        known = [(row.cost(kind), row) for row in self.rows]
        priced = [(cost, row) for cost, row in known if cost is not None]
        best, front = -math.inf, []
        for _, row in sorted(priced, key=lambda entry: (entry[0], -self.order(entry[1]))):
            if self.order(row) > best:
                best = self.order(row)
                front.append(row)
        return front

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Comparison:
        """Read what `to_dict` gave; what follows from the rows is not read but follows again."""
        known = {entry.name: said[entry.name] for entry in fields(cls)}
        names = [entry.name for entry in fields(Row)]
        rows = [{name: row[name] for name in names} for row in said["rows"]]
        return cls(
            **known
            | {
                "sizes": tuple(said["sizes"]),
                "trials": {
                    name: {trial["lr"]: trial["validation"] for trial in tried}
                    for name, tried in said["trials"].items()
                },
                "paces": {name: (rate, epochs) for name, (rate, epochs) in said["paces"].items()},
                "rows": tuple(
                    Row(**row | {name: tuple(row[name]) for name in ("scores", "runs")})
                    for row in rows
                ),
                "missing": tuple((entry["what"], entry["reason"]) for entry in said["missing"]),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, what follows from the rows included, for JSON."""
        place = {id(row): i for i, row in enumerate(self.rows)}
        return {
            **{key: value for key, value in asdict(self).items() if key != "rows"},
            "trials": {
                name: [{"lr": lr, "validation": value} for lr, value in tried.items()]
                for name, tried in self.trials.items()
            },
            "missing": [{"what": what, "reason": reason} for what, reason in self.missing],
            "rows": [asdict(row) | {"mean": row.mean, "spread": row.spread} for row in self.rows],
            "winners": [
                {
                    "size": w.size,
                    "row": place[id(w.row)],
                    "second": None if w.second is None else place[id(w.second)],
                    "ahead": w.ahead,
                    "spread": w.spread,
                    "clear": w.clear,
                }
                for w in self.winners
            ],
            "fronts": {kind: [place[id(row)] for row in self.front(kind)] for kind in COSTS},
        }
