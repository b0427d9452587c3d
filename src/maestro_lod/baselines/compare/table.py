"""Results of a comparison: mean and spread over seeds, winner of each size, Pareto fronts.

All of it is computed from the runs, so the same runs always give the same table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import mean, stdev
from typing import Any

from maestro_lod.baselines.compare.comparison_text import as_text
from maestro_lod.baselines.compare.metrics import better

_SLACK = 1.005
"""Tolerance: a model of up to this many times a size counts as that size."""

COSTS = ("params", "macs", "bytes", "latency", "training")
"""Costs that quality is compared with."""


@dataclass(frozen=True)
class Row:
    """One contender at one size, over all seeds; costs are means."""

    method: str
    size: float | None
    """The requested share; None if the method determines the size."""
    share: float
    params: float
    macs: float
    bytes: float
    training: float
    """MACs of the training, relative to one training of the dense model."""
    seconds: float
    """Wall-clock time of the training, which depends on the load of the machine."""
    scores: tuple[float, ...]
    """One per seed."""
    runs: tuple[str, ...]
    latency: float | None = None
    """Seconds per call of the model of the first seed."""

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
    """The best model within a size, and the best one of another method.

    If both are tied, the smaller one wins.
    """

    size: float
    row: Row
    second: Row | None

    @property
    def ahead(self) -> float | None:
        """Difference between the two means."""
        return None if self.second is None else abs(self.row.mean - self.second.mean)

    @property
    def spread(self) -> float | None:
        """Sum of the standard deviations of both over seeds."""
        if self.second is None or self.row.spread is None or self.second.spread is None:
            return None
        return self.row.spread + self.second.spread

    @property
    def clear(self) -> bool | None:
        """True if the difference is larger than the spread; None if the spread is unknown."""
        if self.ahead is None or self.spread is None:
            return None
        return self.ahead > self.spread

    @property
    def tied(self) -> bool:
        """True if the means are equal, or differ by at most the spread."""
        return self.ahead == 0.0 or self.clear is False


@dataclass(frozen=True)
class Comparison:
    """Results of all contenders."""

    recipe: str
    metric: str
    split: str
    epochs: int
    seeds: int
    budget: float | None
    lr_trials: int
    sizes: tuple[float, ...]
    dense: Mapping[str, float]
    """Params, MACs and bytes of the dense model."""
    trials: Mapping[str, Mapping[float, float | None]]
    """Validation score of each learning rate by method; None where it failed."""
    paces: Mapping[str, tuple[float, int]]
    """Learning rate and epochs of each method."""
    rows: tuple[Row, ...]
    missing: tuple[tuple[str, str], ...]
    """Missing models, and the reasons."""

    def __str__(self) -> str:
        return as_text(self)

    def order(self, row: Row) -> float:
        """Return the mean score of a row, larger being better."""
        return better(self.metric, row.mean)

    @property
    def winners(self) -> list[Winner]:
        """Winner of each size, largest size first; sizes without a model are left out."""
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
        """Return the rows that no other beats in both cost and quality, cheapest first."""
        known = [(row.cost(kind), row) for row in self.rows]
        priced = [(cost, row) for cost, row in known if cost is not None]
        best, front = -math.inf, []
        for _, row in sorted(priced, key=lambda entry: (entry[0], -self.order(entry[1]))):
            if self.order(row) > best:
                best = self.order(row)
                front.append(row)
        return front

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Comparison:
        """Read a comparison that `to_dict` has written; derived results are computed again."""
        known = {entry.name: values[entry.name] for entry in fields(cls)}
        names = [entry.name for entry in fields(Row)]
        rows = [{name: row[name] for name in names} for row in values["rows"]]
        return cls(
            **known
            | {
                "sizes": tuple(values["sizes"]),
                "trials": {
                    name: {trial["lr"]: trial["validation"] for trial in tried}
                    for name, tried in values["trials"].items()
                },
                "paces": {name: (rate, epochs) for name, (rate, epochs) in values["paces"].items()},
                "rows": tuple(
                    Row(**row | {name: tuple(row[name]) for name in ("scores", "runs")})
                    for row in rows
                ),
                "missing": tuple((entry["what"], entry["reason"]) for entry in values["missing"]),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and derived results as JSON values."""
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
