"""Overview of runs: notices, cards, comparison, settings and environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maestro_lod.cli.report.parts import (
    SIZES,
    PageSection,
    bar,
    breakable,
    capital,
    named,
    note,
    run_label,
    show,
    table,
)
from maestro_lod.cli.report.runs import METRICS, ReportedRun, SplitScore, number
from maestro_lod.cli.report.text import duration, of_dense, plain, quantity, times
from maestro_lod.text import Markup, joined, tag


def notices(run: ReportedRun, *, alone: bool) -> Iterator[Markup]:
    """Yield notices: that a run is unfinished, and the last note of its training.

    A note of an earlier epoch than the last is shown for unfinished runs only.
    """
    if unfinished := _status(run, alone=alone):
        yield unfinished
    notes = [(place, epoch.note) for place, epoch in enumerate(run.epochs) if epoch.note]
    if notes and (notes[-1][0] == len(run.epochs) - 1 or not run.finished):
        subject = "" if alone else f"{run.name}: "
        yield tag("p", tag("b", "Note."), " ", capital(f"{subject}{notes[-1][1]}"), class_="notice")


def _status(run: ReportedRun, *, alone: bool) -> Markup | None:
    """Return the notice of an unfinished run; None for a finished one."""
    if run.finished:
        return None
    planned = number(run.config, "epochs")
    of = "" if planned is None else f" of {planned:g}"
    if run.epochs:
        text = f"{len(run.epochs)}{of} epochs are finished; the numbers are those of the last one."
    else:
        text = "No epoch is finished, so there are no numbers yet."
    subject = "Unfinished." if alone else f"{run.name} is unfinished."
    return tag("p", tag("b", subject), " ", text, class_="notice")


def key_figures(run: ReportedRun) -> Markup | None:
    """Return one card per key figure of a run; None if it has none yet."""
    cards = list(_cards(run))
    return tag("div", *cards, class_="cards") if cards else None


def _cards(run: ReportedRun) -> Iterator[Markup]:
    if score := run.score():
        others = [run.score_on(score.split, m) for m in METRICS if m != score.metric]
        others_text = ", ".join(f"{named(s.metric)} {show(s.metric)(s.value)}" for s in others if s)
        name = capital(f"{score.split} {named(score.metric)}")
        yield _card(name, show(score.metric)(score.value), others_text)
    for kind, name in SIZES.items():
        size = run.size(kind)
        if size.value is not None:
            share = (
                "" if size.relative is None else f"{times(size.relative)} of {quantity(size.dense)}"
            )
            yield _card(capital(name), quantity(size.value), share, size.relative)
    if run.low_rank:
        total, full = sum(run.final_ranks.values()), sum(run.full_ranks.values())
        yield _card("Total rank", plain(total), f"of {plain(full)}", total / full if full else None)
    relative = number(run.ledger, "relative_macs")
    if relative is not None:
        params = times(number(run.ledger, "relative_params"))
        yield _card("Training MACs", times(relative), f"of dense; parameters {params}", relative)
    if run.seconds is not None:
        count = len(run.epochs)
        yield _card("Training time", duration(run.seconds), f"{count} epoch{'s' * (count != 1)}")


def _card(name: str, value: str, remark: str, share: float | None = None) -> Markup:
    return tag(
        "div",
        tag("p", name, class_="name"),
        tag("p", value, class_="value"),
        None if share is None else bar(share),
        tag("p", remark),
        class_="card s0",
    )


def comparison(runs: Sequence[ReportedRun]) -> PageSection:
    """Return a table with one row per run."""
    metrics = [metric for metric in METRICS if any(run.score(metric) for run in runs)]
    header = ["run", *map(named, metrics), *SIZES.values(), "total rank", "epochs", "time"]
    rows = []
    for series, run in enumerate(runs):
        sizes = [run.size(kind) for kind in SIZES]
        rows.append(
            [
                run_label(run, series),
                *(_score_cell(run.score(metric)) for metric in metrics),
                *(of_dense(size.value, size.relative) for size in sizes),
                plain(sum(run.final_ranks.values())) if run.low_rank else "–",
                str(len(run.epochs)),
                duration(run.seconds),
            ]
        )
    remark = "Scores are on test data unless marked. × is relative to the dense model."
    return PageSection(
        "comparison", "Comparison", joined(table("Runs", header, rows), note(remark))
    )


def _score_cell(score: SplitScore | None) -> str:
    if score is None:
        return "–"
    value = show(score.metric)(score.value)
    return value if score.split == "test" else joined(value, " ", tag("small", score.split))


def settings(runs: Sequence[ReportedRun]) -> PageSection | None:
    """Return the settings of the runs."""
    return _facts("Settings", "Settings of the run", runs, [run.config for run in runs])


def environment(runs: Sequence[ReportedRun]) -> PageSection | None:
    """Return the versions and machines of the runs."""
    return _facts(
        "Environment", "Versions and machine of the run", runs, [run.environment for run in runs]
    )


def _facts(
    title: str, caption: str, runs: Sequence[ReportedRun], facts: Sequence[Mapping[str, Any]]
) -> PageSection | None:
    """Return tables of nested values of each run; values that differ between runs come first."""
    flat = [dict(_flat(each)) for each in facts]
    values = {key: [each.get(key, "–") for each in flat] for each in flat for key in each}
    if not values:
        return None
    rows = {key: [breakable(key), *texts] for key, texts in values.items()}
    differ = [key for key, texts in values.items() if len(set(texts)) > 1]
    tables = []
    if differ:
        header = ["", *(run_label(run, series) for series, run in enumerate(runs))]
        tables.append(table("Different", header, [rows[key] for key in differ], texts=True))
    if same := [rows[key][:2] for key in rows if key not in differ]:
        caption = caption if len(runs) == 1 else "The same in all runs"
        tables.append(table(caption, ["", "value"], same, texts=True))
    return PageSection(title.lower(), title, joined(*tables))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values as dotted names and texts."""
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)
