"""Comparison as a self-contained HTML page and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from maestro_lod.baselines.compare.comparison_text import (
    HEADER,
    cost_texts,
    describe_conditions,
    describe_front,
    describe_winner,
    score_text,
    size_text,
    sorted_rows,
)
from maestro_lod.baselines.compare.table import COSTS, Comparison, Row
from maestro_lod.cli.report.charts import Dot, badge, plane
from maestro_lod.cli.report.page import document, section_of
from maestro_lod.cli.report.parts import PageSection, capital, grid, named, note, show, table, tick
from maestro_lod.cli.report.text import duration, plain, quantity, times
from maestro_lod.files.atomic import replacing
from maestro_lod.model.plot import Format
from maestro_lod.text import Markup, joined, tag

_AXES: dict[str, tuple[str, Format]] = {
    "params": ("parameters", quantity),
    "macs": ("MACs", quantity),
    "bytes": ("bytes", lambda value: quantity(value, "B")),
    "latency": ("latency of one sample", duration),
    "training": ("training MACs", times),
}
_WORTH_DRAWING = 0.1
"""Largest distance in accuracy below the best that is drawn, so that the others stay apart."""


def write_page(found: Comparison, out: Path) -> None:
    """Write compare.json and compare.html to the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "compare.json") as place:
        text = json.dumps(found.to_dict(), indent=1, allow_nan=False)
        place.write_text(text + "\n", encoding="utf-8")
    with replacing(out / "compare.html") as place:
        place.write_bytes(page(found).encode("utf-8", errors="xmlcharrefreplace"))


def page(found: Comparison) -> str:
    """Return the whole page as HTML."""
    sections = [
        PageSection("winners", "Best models", _verdict(found)),
        PageSection("costs", f"{capital(named(found.metric))} against cost", _charts(found)),
        PageSection("table", "All models", _table(found)),
        PageSection("rates", "Learning rates", _rates(found)),
        PageSection("missing", "Missing models", _missing(found)),
    ]
    shown = [section for section in sections if section.body]
    links = [tag("a", section.title, href=f"#{section.id}") for section in shown]
    return document(
        f"Smaller models for {found.recipe}",
        above=[tag("p", describe_conditions(found), class_="lead")],
        content=[tag("nav", *links, aria_label="Sections"), *map(section_of, shown)],
    )


def _verdict(found: Comparison) -> Markup:
    texts = [describe_winner(found, winner) for winner in found.winners]
    return joined(*(tag("p", text) for text in [*texts, describe_front(found)] if text))


# -- charts ------------------------------------------------------------------------------------


def _methods(found: Comparison) -> list[str]:
    return list(dict.fromkeys(row.method for row in found.rows))


def _charts(found: Comparison) -> Markup:
    methods = _methods(found)
    entries = (tag("li", _label(found, name)) for name in methods)
    legend = tag("ul", *entries, class_="legend")
    charts = grid([_chart(found, kind) for kind in COSTS])
    remark = (
        "Each mark is the mean over seeds of one method at one size; the vertical line is the "
        "standard deviation. The dotted line connects the models that no other beats in both cost "
        "and quality."
    )
    return joined(legend, charts, note(remark)) if charts is not None else Markup("")


def _chart(found: Comparison, kind: str) -> Markup | None:
    drawn = _worth_drawing(found)
    methods, (name, write) = _methods(found), _AXES[kind]
    dots = {}
    for row in drawn:
        cost = row.cost(kind)
        if cost:
            facts = [(name, write(cost)), (named(found.metric), score_text(found, row))]
            title = f"{row.method}, {size_text(row)}" if row.size else row.method
            series = methods.index(row.method)
            dots[id(row)] = Dot(title, cost, row.mean, series, facts, spread=row.spread)
    left_out = len(found.rows) - len(drawn)
    return plane(
        f"{capital(named(found.metric))} against {name}",
        [*dots.values()],
        kind=kind,
        show=show(found.metric),
        tick=tick(found.metric),
        front=[dots[id(row)] for row in found.front(kind) if id(row) in dots],
        show_x=write,
        note=f"{left_out} with much lower accuracy are in the table only" if left_out else None,
    )


def _worth_drawing(found: Comparison) -> list[Row]:
    if found.metric != "accuracy" or not found.rows:
        return [*found.rows]
    best_of_all = max(row.mean for row in found.rows)
    return [row for row in found.rows if row.mean >= best_of_all - _WORTH_DRAWING]


# -- tables ------------------------------------------------------------------------------------


def _label(found: Comparison, method: str) -> Markup:
    methods = _methods(found)
    return joined(badge(methods.index(method)) if method in methods else None, method)


def _table(found: Comparison) -> Markup:
    fronts = {id(row) for row in found.front("params")}
    rows = [
        [
            _label(found, row.method),
            size_text(row),
            *cost_texts(found, row),
            score_text(found, row) + (" ★" if id(row) in fronts else ""),
            str(len(row.scores)),
        ]
        for row in sorted_rows(found)
    ]
    header = ["method", "size", *HEADER[2:], f"{found.split} {named(found.metric)}", "seeds"]
    remark = (
        "× is relative to the dense model, for training to one training of the dense model. Bytes "
        "include the positions of the non-zeros of a sparse model. ★: no other model beats it in "
        "both parameters and quality."
    )
    return joined(table("Methods by size", header, rows), note(remark)) if rows else Markup("")


def _rates(found: Comparison) -> Markup:
    rows = []
    for name, (rate, epochs) in found.paces.items():
        tried = [
            f"{plain(lr)}: {'failed' if value is None else show(found.metric)(value)}"
            for lr, value in found.trials.get(name, {}).items()
        ]
        rows.append([_label(found, name), plain(rate), str(epochs), ", ".join(tried) or "–"])
    if not rows:
        return Markup("")
    header = ["method", "learning rate", "epochs", "on validation data"]
    return table("Chosen for each method", header, rows, texts=True)


def _missing(found: Comparison) -> Markup:
    rows = [[what, reason] for what, reason in found.missing]
    return table("Not in the table", ["model", "reason"], rows, texts=True) if rows else Markup("")
