"""Charts of all runs: quality against size, metrics and costs over training."""

from __future__ import annotations

from collections.abc import Sequence

from maestro_lod.cli.report.charts import SMALL, Dot, Line, line_chart, plane
from maestro_lod.cli.report.parts import (
    SIZES,
    PageSection,
    capital,
    grid,
    named,
    note,
    run_label,
    show,
    table,
    tick,
)
from maestro_lod.cli.report.runs import ReportedRun, drawable, number
from maestro_lod.cli.report.text import of_dense, plain, quantity, times
from maestro_lod.text import Markup, joined, tag

_SPLITS = ("train_", "validation_")
# drawn by `cost`, or not a measurement
_CHARTED = {"epoch", "step", "total_rank", *SIZES, *(f"relative_{kind}" for kind in SIZES)}


def planes(runs: Sequence[ReportedRun]) -> PageSection | None:
    """Return charts of quality against size, one mark per run."""
    headline = next((score for run in runs if (score := run.score())), None)
    if headline is None:
        return None
    charts = [_plane(runs, headline.metric, kind) for kind in SIZES]
    body = grid(charts, runs)
    if body is None:
        return None
    if not all(run.finished for run in runs):
        body = joined(body, note("Hollow marks: unfinished runs, not measured on test data."))
    return PageSection("planes", "Quality and size", body)


def _plane(runs: Sequence[ReportedRun], metric: str, kind: str) -> Markup | None:
    dots = []
    for series, run in enumerate(runs):
        score, size = run.score(metric), run.size(kind)
        if score and size.value and size.value > 0:
            rows = [
                (f"{score.split} {named(metric)}", show(metric)(score.value)),
                (SIZES[kind], of_dense(size.value, size.relative)),
            ]
            hollow = not run.finished
            dots.append(Dot(run.name, size.value, score.value, series, rows, hollow))
    title = f"{capital(named(metric))} against {SIZES[kind]}"
    return plane(title, dots, kind=kind, show=show(metric), tick=tick(metric))


def curves(runs: Sequence[ReportedRun]) -> PageSection | None:
    """Return charts of all metrics of training and validation over epochs."""
    metrics = dict.fromkeys(("loss", "accuracy"))
    metrics |= {key.partition("_")[2]: None for key in _keys(runs) if key.startswith(_SPLITS)}
    body = grid([_curve(runs, metric) for metric in metrics], runs)
    return None if body is None else PageSection("training", "Training", body)


def _curve(runs: Sequence[ReportedRun], metric: str) -> Markup | None:
    validated = f"validation_{metric}" in _keys(runs)
    lines = [
        Line(
            split if len(runs) == 1 else f"{run.name}, {split}",
            run.trend(f"{split}_{metric}"),
            series,
            faint=validated and split == "train",
        )
        for series, run in enumerate(runs)
        for split in ("train", "validation")
    ]
    remark = "solid: validation, dashed: training" if validated else "training"
    title = capital(named(metric))
    return line_chart(title, lines, show=show(metric), tick=tick(metric), note=remark)


def cost(runs: Sequence[ReportedRun]) -> PageSection | None:
    """Return charts of size over training, relative to dense, and the cost of training."""
    full = {sum(run.full_ranks.values()) for run in runs if run.finished and run.low_rank}
    charts = [
        line_chart(
            "Total rank",
            _lines(runs, "total_rank"),
            show=plain,
            tick=quantity,
            references={"full rank": full.pop()} if len(full) == 1 else None,
            from_zero=True,
            frame=SMALL,
        )
    ]
    for kind, name in SIZES.items():
        charts.append(
            line_chart(
                f"{capital(name)} relative to dense",
                _lines(runs, f"relative_{kind}"),
                show=times,
                references={"dense": 1.0} | _budgets(runs, kind),
                from_zero=True,
                frame=SMALL,
            )
        )
    body = grid(charts, runs)
    if body is None:
        return None
    return PageSection("cost", "Cost relative to dense", joined(body, _ledger(runs)))


def _budgets(runs: Sequence[ReportedRun], kind: str) -> dict[str, float]:
    """Return the budget of the runs relative to dense, if all have the same."""
    shares = {
        run.epochs[-1].budget
        for run in runs
        if run.epochs and (run.config.get("budget") or {}).get(kind)
    }
    share = drawable(shares.pop()) if len(shares) == 1 else None
    return {} if share is None else {"budget": share}


def _ledger(runs: Sequence[ReportedRun]) -> Markup:
    """Return a table of the costs of the models and of their training, relative to dense."""
    remark = note(
        "The model is counted with each layer in its smallest form. Training is "
        "counted by the parameters in memory and the expected forward MACs of a step, always "
        "factored; “as executed” counts the form in which each layer was computed."
    )
    if len(runs) == 1:
        rows = [[name, *map(times, pair)] for name, pair in _costs(runs[0]).items() if any(pair)]
        content = table("Cost relative to dense", ["", *SIZES.values()], rows)
        return tag("div", content, remark, class_="ledger")
    rows = []
    for series, run in enumerate(runs):
        pairs = _costs(run).values()
        texts = [", ".join(map(times, pair)) if any(pair) else "–" for pair in pairs]
        rows.append([run_label(run, series), *texts])
    header = ["run", *_costs(runs[0])]
    return joined(table("Cost relative to dense: parameters, MACs", header, rows), remark)


def _costs(run: ReportedRun) -> dict[str, tuple[float | None, float | None]]:
    """Return relative parameters and MACs of the model and of its training."""
    ledger, sizes = run.ledger, [run.size(kind).relative for kind in SIZES]
    return {
        "model": (sizes[0], sizes[1]),
        "model, mean of epochs": (run.mean("relative_params"), run.mean("relative_macs")),
        "training": (number(ledger, "relative_params"), number(ledger, "relative_macs")),
        "training, as executed": (None, number(ledger, "relative_executed_macs")),
    }


def other_curves(runs: Sequence[ReportedRun]) -> PageSection | None:
    """Return charts of all other numbers that change over epochs, such as the learning rate."""
    charts = []
    for key in _keys(runs):
        lines = _lines(runs, key)
        changes = any(len({y for _, y in line.points if y is not None}) > 1 for line in lines)
        if changes and key not in _CHARTED and not key.startswith(_SPLITS):
            title = "Seconds per epoch" if key == "seconds" else capital(named(key))
            charts.append(line_chart(title, lines, show=plain, frame=SMALL))
    body = grid(charts, runs)
    return None if body is None else PageSection("also", "Also recorded", body)


def _keys(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the keys that the epochs of all runs record."""
    return list(
        dict.fromkeys(key for run in runs for epoch in run.epochs for key in epoch.numbers())
    )


def _lines(runs: Sequence[ReportedRun], key: str) -> list[Line]:
    return [
        Line(run.name if len(runs) > 1 else named(key), run.trend(key), series)
        for series, run in enumerate(runs)
    ]
