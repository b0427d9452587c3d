"""Page of the report: its sections, style and script in one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from itertools import groupby

from maestro_lod.cli.report.charts import badge
from maestro_lod.cli.report.curves import cost, curves, other_curves, planes
from maestro_lod.cli.report.frontier import frontier
from maestro_lod.cli.report.layers import layers, ranks
from maestro_lod.cli.report.overview import comparison, environment, key_figures, notices, settings
from maestro_lod.cli.report.parts import PageSection
from maestro_lod.cli.report.runs import ReportedRun
from maestro_lod.text import Markup, tag

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath "
    "fill='%230067b0' d='M1 1h3v14H1zM5 5h3v10H5zM9 9h3v6H9zM13 12h2v3h-2z'/%3E%3C/svg%3E"
)


def page(runs: Sequence[ReportedRun]) -> str:
    """Return the page about some runs as HTML."""
    alone = len(runs) == 1
    title = runs[0].name if alone else f"{len(runs)} runs"
    sections = _sections(runs)
    return document(
        title,
        above=[
            _subtitle(runs),
            *(part for run in runs for part in notices(run, alone=alone)),
        ],
        content=[
            key_figures(runs[0]) if alone else None,
            _links(runs, sections),
            *map(section_of, sections),
        ],
    )


def document(
    title: str, *, above: Sequence[Markup | None], content: Sequence[Markup | None]
) -> str:
    """Return a self-contained page; `above` follows the title."""
    script = _resource("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        # nothing is loaded and no other script runs, whatever the files contain
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'",
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · maestro-lod"),
        tag("link", rel="icon", href=_ICON),
        tag("style", Markup(_resource("style.css"))),
    )
    body = tag(
        "body",
        tag("header", tag("p", "maestro-lod", class_="brand"), tag("h1", title), *above),
        tag("main", *content),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _sections(runs: Sequence[ReportedRun]) -> list[PageSection]:
    alone = len(runs) == 1
    parts = [frontier(runs[0], 0, alone=True)] if alone else [comparison(runs), planes(runs)]
    parts += [curves(runs), cost(runs)]
    for series, run in enumerate(runs):
        parts += [None if alone else frontier(run, series, alone=False)]
        parts += [ranks(run, series, alone=alone), layers(run, series, alone=alone)]
    parts += [other_curves(runs), settings(runs), environment(runs)]
    return [part for part in parts if part is not None]


def _links(runs: Sequence[ReportedRun], sections: Sequence[PageSection]) -> Markup:
    """Return links to the sections; the sections of one run among several share a link."""
    links = []
    for series, group in groupby(sections, key=lambda section: section.series):
        found = list(group)
        if series is not None:
            links.append(tag("a", badge(series), runs[series].name, href=f"#{found[0].id}"))
        else:
            links += [tag("a", section.title, href=f"#{section.id}") for section in found]
    return tag("nav", *links, aria_label="Sections")


def section_of(section: PageSection) -> Markup:
    """Return a section with its heading."""
    mark = None if section.series is None else badge(section.series)
    heading = tag("h2", mark, section.title, id=section.id)
    return tag("section", heading, section.body, aria_labelledby=section.id)


def _subtitle(runs: Sequence[ReportedRun]) -> Markup | None:
    if len(runs) > 1:
        return tag("p", "Comparison of ", ", ".join(run.name for run in runs), class_="lead")
    description = runs[0].config.get("description")
    return tag("p", str(description), class_="lead") if description else None


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
