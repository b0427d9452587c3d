"""Layers of one run: ranks over training and at the end, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from maestro_lod.cli.report.parts import SIZES, PageSection, about, bar, breakable, note, table
from maestro_lod.cli.report.runs import ReportedRun, mapping, number, records
from maestro_lod.cli.report.text import plain, quantity, times
from maestro_lod.model.plot import colour
from maestro_lod.text import Markup, joined, tag


def ranks(run: ReportedRun, series: int, *, alone: bool) -> PageSection | None:
    """Return the ranks of all layers: a heat map over training, and the final values."""
    if not run.low_rank:
        return None
    full, final = run.full_ranks, run.final_ranks
    strips = {
        name: _strip([ranks.get(name) for ranks in run.ranks], full[name]) for name in run.layers
    }
    body = tag("div", rank_table(final, full, series, strips), class_="box")
    remark = "Over training: a stronger colour is closer to full rank."
    if not run.finished:
        remark += " Until the run is finished, full rank means the largest rank seen."
    return about(run, series, alone, "Ranks", joined(body, note(remark)))


def rank_table(
    final: Mapping[str, float],
    full: Mapping[str, float],
    series: int,
    strips: Mapping[str, Markup] | None = None,
) -> Markup:
    """Return a table of ranks with a bar from zero to full rank, and a strip if there is one."""
    names = list(strips or final)
    rows = []
    for name in names:
        rank, most = final.get(name, 0), full[name]
        rows.append(
            tag(
                "tr",
                tag("th", breakable(name), scope="row"),
                tag("td", strips[name], class_="strip") if strips else None,
                tag("td", bar(rank / most if most else 0.0)),
                tag("td", tag("b", f"{rank:g}"), f" / {most:g}", class_="number"),
            )
        )
    header = ["layer", *(["over training"] if strips else []), "rank", "of full"]
    return tag(
        "table",
        tag("caption", "Rank of each layer"),
        tag("thead", tag("tr", *(tag("th", text, scope="col") for text in header))),
        tag("tbody", *rows),
        class_=f"ranks {colour(series)}{' many' if len(names) > 24 else ''}",
    )


def _strip(history: Sequence[float | None], full: float) -> Markup:
    """Draw the row of a layer in the heat map; epochs of equal rank share a rectangle."""
    pieces, start = [], 0
    for rank, epochs in groupby(history):
        width = len(list(epochs))
        if rank is not None and full:
            depth = f"{0.08 + 0.92 * min(rank / full, 1.0):.3f}"
            pieces.append(tag("rect", x=start, width=width, height=1, fill_opacity=depth))
        start += width
    return tag(
        "svg",
        *pieces,
        viewBox=f"0 0 {len(history)} 1",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def layers(run: ReportedRun, series: int, *, alone: bool) -> PageSection | None:
    """Return the cost of each layer of the finished model."""
    summary = mapping(run.result.get("summary"))
    costs = records(summary.get("layers"))
    if not costs:
        return None
    header = ["layer", "kind", "weight", "rank", "params", "× dense", "MACs", "× dense", "form"]
    totals = [
        [name, "", "", "", *_sizes(summary, prefix), ""]
        for name, prefix in (
            ("total, factored", ""),
            ("total, best forms", "fused_"),
            ("total, dense", "dense_"),
        )
    ]
    body = table("Cost of each layer", header, [_row(layer) for layer in costs], totals)
    return about(run, series, alone, "Layers", body)


def _row(layer: Mapping[str, Any]) -> list[str]:
    rank, shape = number(layer, "rank"), layer.get("shape")
    return [
        breakable(str(layer.get("name") or "everything else")),
        str(layer.get("kind", "–")),
        "×".join(map(str, shape)) if isinstance(shape, list) else "–",
        "–" if rank is None else f"{rank:g} / {plain(number(layer, 'full_rank'))}",
        *_sizes(layer),
        str(layer.get("form", "–")),
    ]


def _sizes(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return parameters and MACs, each absolute and relative to dense."""
    cells = []
    for kind in SIZES:
        value, dense = number(record, prefix + kind), number(record, f"dense_{kind}")
        relative = value / dense if value is not None and dense else None
        cells += [quantity(value), times(relative)]
    return cells
