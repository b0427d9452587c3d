"""Building blocks of sections: names, bars, tables and grids of charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maestro_lod.cli.report.charts import badge
from maestro_lod.cli.report.runs import ReportedRun
from maestro_lod.cli.report.text import percent, percent_tick, plain
from maestro_lod.model.plot import Format
from maestro_lod.text import Markup, joined, tag

SIZES = {"params": "parameters", "macs": "MACs"}
"""Names of the sizes of a model."""

_NAMES = {"bleu": "BLEU", "lr": "learning rate", "penalty": "penalty λ", "macs": "MACs"}


@dataclass(frozen=True)
class PageSection:
    """Section of the page; `series` is the run that it describes, if it is a single one."""

    id: str
    title: str
    body: Markup
    series: int | None = None


def about(run: ReportedRun, series: int, alone: bool, title: str, body: Markup) -> PageSection:
    """Return a section about one run; its title names the run unless it is the only one."""
    name = f"{title.lower().replace(' ', '-')}-{series}"
    if alone:
        return PageSection(name, title, body)
    return PageSection(name, f"{run.name}: {title.lower()}", body, series)


def named(key: str) -> str:
    """Return the readable name of a key."""
    return _NAMES.get(key, key.replace("_", " "))


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def show(metric: str) -> Format:
    """Return the function that formats values of a metric."""
    return percent if metric.endswith("accuracy") else plain


def tick(metric: str) -> Format:
    """Return the function that formats labels of an axis of a metric."""
    return percent_tick if metric.endswith("accuracy") else plain


def run_label(run: ReportedRun, series: int) -> Markup:
    """Return the mark and the name of a run."""
    return joined(badge(series), breakable(run.name))


def breakable(name: str) -> Markup:
    """Return a dotted name that can wrap after its dots."""
    first, *rest = name.split(".")
    return joined(first, *(joined(".", tag("wbr"), part) for part in rest))


def bar(share: float) -> Markup:
    """Draw a share of a whole; screen readers skip it, because its number is in the text."""
    width = f"width:{100 * min(max(share, 0.0), 1.0):.1f}%"
    return tag("div", tag("div", style=width), class_="bar", aria_hidden="true")


def note(text: str) -> Markup:
    """Return a remark below a table or chart."""
    return tag("p", text, class_="note")


def grid(charts: Sequence[Markup | None], runs: Sequence[ReportedRun] = ()) -> Markup | None:
    """Return charts in a grid, with a legend if there are several runs; None without charts."""
    drawn = [chart for chart in charts if chart is not None]
    if not drawn:
        return None
    legend = None
    if len(runs) > 1:
        entries = (tag("li", run_label(run, series)) for series, run in enumerate(runs))
        legend = tag("ul", *entries, class_="legend")
    return joined(legend, tag("div", *drawn, class_="charts"))


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    totals: Sequence[Sequence[str]] = (),
    *,
    texts: bool = False,
) -> Markup:
    """Return a table that scrolls if the page is too narrow."""

    def row(cells: Sequence[str]) -> Markup:
        first, *rest = cells
        return tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest))

    content = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in header))),
        tag("tbody", *map(row, rows)),
        tag("tfoot", *map(row, totals)) if totals else None,
        class_="texts" if texts else None,
    )
    return scrolling(content, caption, tall=len(rows) > 20)


def scrolling(content: Markup, name: str, *, tall: bool) -> Markup:
    """Return content in a box that scrolls sideways, and vertically if it is tall."""
    kind = "box tall" if tall else "box"
    return tag("div", content, class_=kind, tabindex=0, role="region", aria_label=name)
