"""Every size of one trained model, and a slider that picks the best one within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maestro_lod.app.report.charts import Dot, data, plane
from maestro_lod.app.report.layers import rank_table
from maestro_lod.app.report.parts import (
    SIZES,
    PageSection,
    about,
    capital,
    grid,
    named,
    note,
    scrolling,
    show,
    table,
    tick,
)
from maestro_lod.app.report.runs import ReportedRun, mapping, number, ranks_of, records
from maestro_lod.app.report.text import duration, percent, plain, quantity, times
from maestro_lod.markup import Markup, tag
from maestro_lod.plot import colour


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


@dataclass(frozen=True)
class Sizes:
    """The sizes of a frontier file, cheapest first, and what can be said about all of them."""

    points: list[dict[str, Any]]
    dense: dict[str, Any]
    metric: str
    axes: list[str]
    facts: list[Fact]

    @classmethod
    def of(cls, frontier: Mapping[str, Any]) -> Sizes | None:
        """Return the sizes, or None if they lack quality or cost."""
        points = records(frontier.get("points"))
        metrics = [m for m in ("accuracy", "loss") if _all_have(points, m)]
        axes = [axis for axis in ("macs", "params") if _all_have(points, axis, above=0)]
        if not points or not metrics or not axes:
            return None
        points.sort(key=lambda point: (number(point, axes[0]), _merit(point)))
        facts = [fact for fact in _FACTS if any(number(p, fact.key) is not None for p in points)]
        return cls(points, mapping(frontier.get("dense")), metrics[0], axes, facts)

    def told(self, point: Mapping[str, Any]) -> list[str]:
        """Write the facts about a point."""
        texts = []
        for fact in self.facts:
            value, whole = number(point, fact.key), number(self.dense, fact.key)
            share = f" · {times(value / whole)}" if fact.is_cost and value and whole else ""
            texts.append(fact.write(value) + share)
        return texts


def _all_have(points: Sequence[Mapping[str, Any]], key: str, above: float = -math.inf) -> bool:
    values = [number(point, key) for point in points]
    return all(value is not None and value > above for value in values)


def _merit(point: Mapping[str, Any]) -> float:
    """Return what the better choice has more of: less loss, or else more accuracy."""
    loss = number(point, "loss")
    return -loss if loss is not None else number(point, "accuracy") or 0.0


def frontier(run: ReportedRun, series: int, *, alone: bool) -> PageSection | None:
    """Return quality against cost for every size, and controls that walk along it."""
    sizes = Sizes.of(run.frontier)
    if sizes is None:
        return None
    ranks = [ranks_of(point) for point in sizes.points]
    layers = list(dict.fromkeys(name for chosen in ranks for name in chosen))
    largest = {name: max(chosen.get(name, 0) for chosen in ranks) for name in layers}
    full = {name: max(run.full_ranks.get(name, 0), largest[name]) for name in layers}
    content = {
        "dense": {axis: number(sizes.dense, axis) for axis in sizes.axes},
        "names": {axis: SIZES[axis] for axis in sizes.axes},
        "full": list(full.values()),
        "points": [
            {
                "cost": {axis: number(point, axis) for axis in sizes.axes},
                "merit": _merit(point),
                "facts": sizes.told(point),
                "ranks": [chosen.get(name, 0) for name in layers],
            }
            for point, chosen in zip(sizes.points, ranks, strict=True)
        ],
    }
    rows = [[f"size {i}", *sizes.told(point)] for i, point in enumerate(sizes.points, start=1)]
    body = tag(
        "div",
        note("Each size is cut from the weights of this one run, without training it again."),
        grid([_chart(sizes, axis, series) for axis in sizes.axes]),
        _controls(sizes, series, rank_table(largest, full, series)),
        table("All sizes", ["", *(fact.name for fact in sizes.facts)], rows),
        data(content),
        class_=f"frontier {colour(series)}",
    )
    return about(run, series, alone, "Every size", body)


def _chart(sizes: Sizes, axis: str, series: int) -> Markup | None:
    def dots(names: Sequence[str], points: Sequence[Mapping[str, Any]], hollow: bool) -> list[Dot]:
        found = []
        for name, point in zip(names, points, strict=True):
            x, y = number(point, axis), number(point, sizes.metric)
            if x is not None and x > 0 and y is not None:
                facts = zip((fact.name for fact in sizes.facts), sizes.told(point), strict=True)
                found.append(Dot(name, x, y, series, list(facts), hollow))
        return found

    dense = dots(["Dense model"], [sizes.dense], hollow=True)
    names = [f"Size {i}" for i in range(1, len(sizes.points) + 1)]
    return plane(
        f"{capital(named(sizes.metric))} against {SIZES[axis]}",
        dense,
        curve=dots(names, sizes.points, hollow=False),
        kind=axis,
        show=show(sizes.metric),
        tick=tick(sizes.metric),
        note="hollow: the dense model" if dense else None,
    )


def _controls(sizes: Sizes, series: int, ranks: Markup) -> Markup:
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
    by = "least loss" if _all_have(sizes.points, "loss") else f"best {sizes.metric}"
    return tag(
        "div",
        tag("fieldset", tag("legend", "Budget in"), *choices),
        tag("p", tag("label", "Budget", for_=slider), tag("output", for_=slider), class_="budget"),
        tag("input", type="range", id=slider, min=0, max=1000, step=1, value=1000),
        note(f"The size with the {by} within the budget:"),
        tag("dl", *facts),
        scrolling(ranks, "Ranks of the chosen size", tall=True),
        class_="controls",
        hidden="",
    )
