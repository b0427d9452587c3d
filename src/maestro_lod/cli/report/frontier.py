"""Sizes of one trained model, and a slider that picks the best one within a budget."""

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
    """Quantity that describes a size; costs are also shown relative to the dense model."""

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
_USEFUL = 0.5  # least share of the best accuracy: smaller sizes are not worth deploying
_SAME_TIME = 0.02  # relative difference up to which latencies count as equal


@dataclass(frozen=True)
class Sizes:
    """Sizes of a frontier file that are worth deploying, cheapest first."""

    points: list[dict[str, Any]]
    dense: dict[str, Any]
    metric: str
    """Metric that is drawn: accuracy if it was measured."""
    by: str
    """Metric that sizes are chosen by: the loss if it was measured."""
    axes: list[str]
    facts: list[Fact]
    hidden: int
    """Number of further sizes in the file."""

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
        measured_on = mapping(frontier.get("measured_on"))
        facts = [
            replace(fact, name=f"{measured_on[fact.key]} {fact.name}")
            if fact.key in measured_on
            else fact
            for fact in _FACTS
            if any(number(p, fact.key) is not None for p in points)
            and (fact.is_cost or fact.key in metrics)
        ]
        dense = mapping(frontier.get("dense"))
        return cls(points, dense, metric, by, axes, facts, len(found) - len(points))

    def texts(self, point: Mapping[str, Any]) -> list[str]:
        """Return the facts about a point as texts."""
        texts = []
        for fact in self.facts:
            value, whole = number(point, fact.key), number(self.dense, fact.key)
            share = f" · {times(value / whole)}" if fact.is_cost and value and whole else ""
            texts.append(fact.write(value) + share)
        return texts

    def name(self, point: Mapping[str, Any]) -> str:
        """Return the name of a size: its share of the cost of the dense form."""
        axis = self.axes[0]
        value, whole = number(point, axis), number(self.dense, axis)
        return f"{times(value / whole) if value and whole else quantity(value)} {SIZES[axis]}"

    def remarks(self) -> str:
        """Return the notes about the numbers and about hidden sizes."""
        texts = [
            "All sizes are cut from the weights of this run, without further training. × is "
            "relative to the dense form: this model with its factors multiplied out, not a model "
            "that was trained dense."
        ]
        names = {fact.key: fact.name for fact in self.facts}
        if names.get(self.metric) == f"validation {self.metric}":
            texts.append("Sizes are measured on validation data, never on test data.")
        times_ = [(number(p, "latency"), number(self.dense, "latency")) for p in self.points]
        if all(one and whole and abs(one / whole - 1) <= _SAME_TIME for one, whole in times_):
            texts.append(
                "Latency counts each layer in its faster form, for one sample. No layer is faster "
                "factored here, so that every size is as fast as the dense form."
            )
        if self.hidden:
            texts.append(
                f"{self.hidden} more in frontier.json {'is' if self.hidden == 1 else 'are'} not "
                "shown: another size is at least as good and as small, or the accuracy is too low."
            )
        return " ".join(texts)


def _is_useful(point: Mapping[str, Any], all_: Sequence[Mapping[str, Any]], metric: str) -> bool:
    if metric != "accuracy":
        return True
    best = max(number(p, metric) or 0.0 for p in all_)
    return (number(point, metric) or 0.0) >= _USEFUL * best


def _front(points: Sequence[dict[str, Any]], axis: str, by: str) -> list[dict[str, Any]]:
    """Return the sizes that are better than every cheaper one, cheapest first."""
    found: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (number(p, axis) or 0.0, -_merit(p, by))):
        if not found or _merit(point, by) > _merit(found[-1], by):
            found.append(point)
    return found


def _all_have(points: Sequence[Mapping[str, Any]], key: str, above: float = -math.inf) -> bool:
    values = [number(point, key) for point in points]
    return all(value is not None and value > above for value in values)


def _merit(point: Mapping[str, Any], by: str) -> float:
    """Return the metric with a sign such that larger is better."""
    value = number(point, by) or 0.0
    return -value if by == "loss" else value


def frontier(run: ReportedRun, series: int, *, alone: bool) -> PageSection | None:
    """Return charts of quality against cost for all sizes, with a slider."""
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
                "facts": sizes.texts(point),
                "ranks": [chosen.get(name, 0) for name in layers],
            }
            for point, chosen in zip(sizes.points, ranks, strict=True)
        ],
    }
    rows = [[sizes.name(point), *sizes.texts(point)] for point in sizes.points]
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
    """Chart of quality against one cost: a line of the best sizes, dots for the others."""

    axis: str
    line: list[dict[str, Any]]
    others: list[dict[str, Any]]
    places: list[int]
    """Index of the dot of each size in the chart."""

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
                    facts = zip(
                        (fact.name for fact in sizes.facts), sizes.texts(point), strict=True
                    )
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
    """Return the slider and the facts that it changes; hidden without the script."""
    slider, group = f"budget-{series}", f"budget-in-{series}"
    choices = []
    for axis in sizes.axes:
        checked = "" if axis == sizes.axes[0] else None
        button = tag("input", type="radio", name=group, value=axis, checked=checked)
        choices.append(tag("label", button, SIZES[axis]))
    facts = [
        tag("div", tag("dt", capital(fact.name)), tag("dd", text))
        for fact, text in zip(sizes.facts, sizes.texts(sizes.points[-1]), strict=True)
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
