"""Every size of one trained model, and a slider that picks the best one within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maestro_lod.cli.report.charts import Dot, data, plane
from maestro_lod.cli.report.layers import rank_table
from maestro_lod.cli.report.parts import (
    SIZES,
    PageSection,
    about,
    capital,
    grid,
    note,
    scrolling,
    show,
    table,
    tick,
)
from maestro_lod.cli.report.runs import ReportedRun, mapping, number, ranks_of, records
from maestro_lod.cli.report.text import duration, percent, plain, quantity, times
from maestro_lod.model.plot import colour
from maestro_lod.text import Markup, tag


@dataclass(frozen=True)
class Fact:
    """Something to know about a size; a cost is also told relative to the dense model."""

    name: str
    key: str
    write: Callable[[float | None], str]
    is_cost: bool = True


_FACTS = (
    Fact("accuracy", "accuracy", percent, is_cost=False),
    Fact("loss", "loss", plain, is_cost=False),
    Fact("MACs", "macs", quantity),
    Fact("parameters", "params", quantity),
    Fact("file", "bytes", lambda value: quantity(value, "B")),
    Fact("latency", "latency", duration),
)
_USEFUL = 0.5  # of the best accuracy: nobody deploys a size with less
_SAME_TIME = 0.02  # latencies this close to the dense form's are the same


@dataclass(frozen=True)
class Sizes:
    """The sizes of a frontier file that one would deploy, cheapest first, and what they have."""

    points: list[dict[str, Any]]
    dense: dict[str, Any]
    metric: str
    """What is drawn: accuracy, where there is one."""
    by: str
    """What sizes are chosen by: the loss, where there is one."""
    axes: list[str]
    facts: list[Fact]
    hidden: int
    """How many more there are in the file."""

    @classmethod
    def of(cls, frontier: Mapping[str, Any]) -> Sizes | None:
        """Return the sizes, or None if they lack quality or cost."""
        found = records(frontier.get("points"))
        metrics = [m for m in ("accuracy", "loss") if _all_have(found, m)]
        axes = [axis for axis in ("macs", "params") if _all_have(found, axis, above=0)]
        if not found or not metrics or not axes:
            return None
        metric, by = metrics[0], metrics[-1]
        useful = [p for p in found if _is_useful(p, found, metric)]
        best = {id(p) for axis in axes for p in _front(useful, axis, by)}
        points = [point for point in useful if id(point) in best]
        points.sort(key=lambda point: (number(point, axes[0]), _merit(point, by)))
        told_on = mapping(frontier.get("measured_on"))
        facts = [
            replace(fact, name=f"{told_on[fact.key]} {fact.name}") if fact.key in told_on else fact
            for fact in _FACTS
            if any(number(p, fact.key) is not None for p in points)
            and (fact.is_cost or fact.key in metrics)
        ]
        dense = mapping(frontier.get("dense"))
        return cls(points, dense, metric, by, axes, facts, len(found) - len(points))

    def told(self, point: Mapping[str, Any]) -> list[str]:
        """Write the facts about a point."""
        texts = []
        for fact in self.facts:
            value, whole = number(point, fact.key), number(self.dense, fact.key)
            share = f" · {times(value / whole)}" if fact.is_cost and value and whole else ""
            texts.append(fact.write(value) + share)
        return texts

    def name(self, point: Mapping[str, Any]) -> str:
        """Name a size by what it is: its share of the dense form's cost."""
        axis = self.axes[0]
        value, whole = number(point, axis), number(self.dense, axis)
        return f"{times(value / whole) if value and whole else quantity(value)} {SIZES[axis]}"

    def remarks(self) -> str:
        """Say what the numbers are, and what is not shown."""
        texts = [
            "Each size is cut from the weights of this one run, without training it again. "
            "× is relative to the dense form: this model with its layers multiplied out, not one "
            "that was trained dense."
        ]
        said = {fact.key: fact.name for fact in self.facts}
        if said.get(self.metric) == f"validation {self.metric}":
            texts.append("Of the data held out only validation data is looked at, not test data.")
        times_ = [(number(p, "latency"), number(self.dense, "latency")) for p in self.points]
        if all(one and whole and abs(one / whole - 1) <= _SAME_TIME for one, whole in times_):
            texts.append(
                "Latency is that of each layer's faster form for one sample, and here none is "
                "faster factored: every size can run as fast as the dense form, none faster."
            )
        if self.hidden:
            texts.append(
                f"{self.hidden} more in frontier.json {'is' if self.hidden == 1 else 'are'} hidden:"
                " another is at least as good and as small, or they are of no use."
            )
        return " ".join(texts)


def _is_useful(point: Mapping[str, Any], all_: Sequence[Mapping[str, Any]], metric: str) -> bool:
    if metric != "accuracy":
        return True
    best = max(number(p, metric) or 0.0 for p in all_)
    return (number(point, metric) or 0.0) >= _USEFUL * best


def _front(points: Sequence[dict[str, Any]], axis: str, by: str) -> list[dict[str, Any]]:
    """Return the sizes that no cheaper one equals, cheapest first."""
    found: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (number(p, axis) or 0.0, -_merit(p, by))):
        if not found or _merit(point, by) > _merit(found[-1], by):
            found.append(point)
    return found


def _all_have(points: Sequence[Mapping[str, Any]], key: str, above: float = -math.inf) -> bool:
    values = [number(point, key) for point in points]
    return all(value is not None and value > above for value in values)


def _merit(point: Mapping[str, Any], by: str) -> float:
    """Return what the better choice has more of."""
    value = number(point, by) or 0.0
    return -value if by == "loss" else value


def frontier(run: ReportedRun, series: int, *, alone: bool) -> PageSection | None:
    """Return quality against cost for every size, and controls that walk along it."""
    sizes = Sizes.of(run.frontier)
    if sizes is None:
        return None
    ranks = [ranks_of(point) for point in sizes.points]
    layers = list(dict.fromkeys(name for chosen in ranks for name in chosen))
    largest = {name: max(chosen.get(name, 0) for chosen in ranks) for name in layers}
    full = {name: max(run.full_ranks.get(name, 0), largest[name]) for name in layers}
    charts = {axis: _Chart.of(sizes, axis) for axis in sizes.axes}
    merits = sorted(_merit(point, sizes.by) for point in sizes.points)
    content = {
        "dense": {axis: number(sizes.dense, axis) for axis in sizes.axes},
        "names": {axis: SIZES[axis] for axis in sizes.axes},
        "full": list(full.values()),
        "places": {axis: chart.places for axis, chart in charts.items()},
        "points": [
            {
                "cost": {axis: number(point, axis) for axis in sizes.axes},
                "merit": merits.index(_merit(point, sizes.by)),
                "name": sizes.name(point),
                "facts": sizes.told(point),
                "ranks": [chosen.get(name, 0) for name in layers],
            }
            for point, chosen in zip(sizes.points, ranks, strict=True)
        ],
    }
    rows = [[sizes.name(point), *sizes.told(point)] for point in sizes.points]
    body = tag(
        "div",
        _controls(sizes, series),
        grid([chart.drawn(sizes, series) for chart in charts.values()]),
        note(sizes.remarks()),
        scrolling(rank_table(largest, full, series), "Ranks of the chosen size", tall=True),
        table("All sizes", ["", *(fact.name for fact in sizes.facts)], rows),
        data(content),
        class_=f"frontier {colour(series)}",
    )
    return about(run, series, alone, "Every size", body)


@dataclass(frozen=True)
class _Chart:
    """Quality against one cost: a line along what is best by this cost, dots for the others."""

    axis: str
    line: list[dict[str, Any]]
    others: list[dict[str, Any]]
    places: list[int]
    """Which of the chart's dots each size is."""

    @classmethod
    def of(cls, sizes: Sizes, axis: str) -> _Chart:
        line = _front(sizes.points, axis, sizes.by)
        others = [p for p in sizes.points if not any(p is best for best in line)]
        order = {id(p): place for place, p in enumerate([*line, *others])}
        return cls(axis, line, others, [order[id(p)] for p in sizes.points])

    def drawn(self, sizes: Sizes, series: int) -> Markup | None:
        def dots(
            points: Sequence[Mapping[str, Any]], name: str | None = None, scale: float = 1.35
        ) -> list[Dot]:
            found = []
            for point in points:
                x, y = number(point, self.axis), number(point, sizes.metric)
                if x is not None and x > 0 and y is not None:
                    facts = zip((fact.name for fact in sizes.facts), sizes.told(point), strict=True)
                    shown = name or capital(sizes.name(point))
                    found.append(Dot(shown, x, y, series, list(facts), name is not None, scale))
            return found

        dense = dots([sizes.dense], "The dense form of this model")
        metric = next(fact.name for fact in sizes.facts if fact.key == sizes.metric)
        return plane(
            f"{capital(metric)} against {SIZES[self.axis]}",
            [*dots(self.others, scale=0.6), *dense],
            curve=dots(self.line),
            kind=self.axis,
            show=show(sizes.metric),
            tick=tick(sizes.metric),
            note="hollow: its dense form" if dense else None,
        )


def _controls(sizes: Sizes, series: int) -> Markup:
    """Return the slider and what it moves; hidden until the script is there to move it."""
    slider, group = f"budget-{series}", f"budget-in-{series}"
    choices = []
    for axis in sizes.axes:
        checked = "" if axis == sizes.axes[0] else None
        button = tag("input", type="radio", name=group, value=axis, checked=checked)
        choices.append(tag("label", button, SIZES[axis]))
    facts = [
        tag("div", tag("dt", capital(fact.name)), tag("dd", text))
        for fact, text in zip(sizes.facts, sizes.told(sizes.points[-1]), strict=True)
    ]
    by = next(fact.name for fact in sizes.facts if fact.key == sizes.by)
    best = f"{'highest' if sizes.by == 'accuracy' else 'lowest'} {by}"
    return tag(
        "div",
        tag("fieldset", tag("legend", "Budget in"), *choices),
        tag("p", tag("label", "Budget", for_=slider), tag("output", for_=slider), class_="budget"),
        tag("input", type="range", id=slider, min=0, max=1000, step=1, value=1000),
        note(f"The size with the {best} within the budget:"),
        tag("dl", *facts),
        class_="controls",
        hidden="",
    )
