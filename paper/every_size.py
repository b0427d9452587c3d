"""Beyond the paper: every size from one training, compared with a training for each size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import mean, stdev
from typing import Any

from torch.utils._pytree import tree_leaves

from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.setup import data_of
from maestro_lod.model.plot import svg
from paper.every_size_cells import LONGER, SHARES, TASKS, Cells, Point
from paper.record import RESULTS, read
from paper.scale import Scale

TITLE = "Beyond the paper: every size from one training"
ITEM = ("lenet", "mlp", "lstm", "resnet", "transformer", "vit")
NAMES = {"params": "params", "macs": "MACs"}
ELASTIC, BUDGET, NARROW, DISTILLED = "elastic", "budget", "narrower", "narrower, distilled"
SVD, OLD_BUDGET, OLD_ELASTIC = "SVD of dense, healed", "budget before", "elastic before"
DENSE, LONG = "dense", "dense, as long"
PER_SIZE = (BUDGET, NARROW, DISTILLED, SVD, OLD_BUDGET, OLD_ELASTIC)
"""Lines that the elastic one is compared with."""
SHOWN_FIRST = {
    ELASTIC: "one training for every size",
    NARROW: "narrower dense, one per size",
    DISTILLED: "the same, distilled",
}
"""What the project's README shows, and how it names it."""
_FROM_CELLS = {BUDGET: "budget", NARROW: "narrower", DISTILLED: "distilled", DENSE: "dense",
               LONG: "long"}  # fmt: skip
_FROM_BEFORE = {NARROW: "narrower", SVD: "SVD of dense, healed", OLD_BUDGET: "budget",
                OLD_ELASTIC: "elastic"}  # fmt: skip
"""Lines that were measured with the methods that Elastic has replaced, on the same data."""

Seeds = dict[str, Point]
"""Seed -> what was reached."""
Line = dict[str, Seeds]
"""Size, "whole" or a share of dense -> seeds."""
Measured = dict[str, Any]
"""Of one task: the samples tested, the epochs, and by kind of cost the lines."""


def measure(scale: Scale) -> dict[str, Measured]:
    return measured(scale, ITEM)


def measured(scale: Scale, tasks: Iterable[str]) -> dict[str, Measured]:
    """Return the points of these tasks that are stored; a smoke test trains the first task's."""
    before = read("every-size", RESULTS / "before")
    known: dict[str, Any] = {} if before is None or scale.smoke else before["result"]
    return {
        TASKS[task].title: _measured(scale, task, known.get(TASKS[task].title))
        for task in scale.some(tuple(tasks))
    }


def _measured(scale: Scale, task: str, before: Mapping[str, Any] | None) -> Measured:
    chosen = TASKS[task]
    written = [f"{key.replace('__', '.')}={value}" for key, value in chosen.changes.items()]
    recipe = load_recipe(chosen.recipe, written)
    test = data_of(recipe).test
    assert test is not None
    lines: dict[str, dict[str, Line]] = {kind: {} for kind in NAMES}
    if before is not None:
        for name, old in _FROM_BEFORE.items():
            for kind, sizes in before["lines"].get(old, {}).items():
                lines[kind][name] = {size: _by_seed(points) for size, points in sizes.items()}
        for name, old in ((DENSE, "SVD of dense"), (OLD_ELASTIC, "elastic")):
            lines["params"].setdefault(name, {})["whole"] = _by_seed(before["whole"][old])
    for seed in chosen.seeds[:1] if scale.smoke else chosen.seeds:
        cells = Cells(scale, task, seed)
        get: Callable[[str], Any] = cells.points if scale.smoke else cells.stored
        for kind, name, line in (
            ("params", ELASTIC, "elastic"),
            ("macs", ELASTIC, "elastic-macs"),
            *(("params", name, line) for name, line in _FROM_CELLS.items()),
        ):
            for size, point in get(line).items():
                if point is not None:
                    lines[kind].setdefault(name, {}).setdefault(size, {})[str(seed)] = point
    if ELASTIC not in lines["macs"]:
        del lines["macs"]
    count = sum(part.numel() for _, target in test for part in tree_leaves(target))
    return {"tested": count, "epochs": recipe.epochs, "lines": lines}


def _by_seed(points: Iterable[Point]) -> Seeds:
    """Return points that were measured before; their times are those of another machine."""
    return {
        str(seed): {key: value for key, value in point.items() if key != "seconds"}
        for seed, point in enumerate(points)
    }


# -- comparisons -----------------------------------------------------------------------------------


def _accuracy(seeds: Seeds | None) -> float | None:
    return 100 * mean(point["accuracy"] for point in seeds.values()) if seeds else None


def _seeds(of: Measured, kind: str, name: str, size: str) -> Seeds:
    found: Seeds = of["lines"].get(kind, {}).get(name, {}).get(size, {})
    return found


def _gap(of: Measured, kind: str, one: str, other: str, size: str) -> tuple[float, float] | None:
    """Return how far one line is above another in pp, and the standard error; None if unknown.

    The error combines the spread over seeds with that of the test samples of both.
    """
    mine, theirs = _seeds(of, kind, one, size), _seeds(of, kind, other, size)
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        return None
    gaps = [100 * (mine[seed]["accuracy"] - theirs[seed]["accuracy"]) for seed in both]
    shares = [mean(line[seed]["accuracy"] for seed in both) for line in (mine, theirs)]
    variance = sum(1e4 * share * (1 - share) for share in shares) / of["tested"]
    if len(gaps) > 1:
        variance += stdev(gaps) ** 2 / len(gaps)
    return mean(gaps), math.sqrt(variance)


def _gaps(
    result: Mapping[str, Measured], other: str, least: float, most: float = 1.0
) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return (task, kind, size) -> gap of the elastic line to another, and its standard error."""
    found = {}
    for task, of in result.items():
        for kind in of["lines"]:
            for size in map(str, SHARES):
                gap = _gap(of, kind, ELASTIC, other, size)
                if least <= float(size) <= most and gap is not None:
                    found[task, kind, size] = gap
    return found


# -- what is shown ---------------------------------------------------------------------------------


def figures(result: dict[str, Measured]) -> dict[str, str]:
    first = next(iter(result.values()))["lines"]["params"]
    curves = {title: _curve(first.get(name, {})) for name, title in SHOWN_FIRST.items()}
    shown = {title: curve for title, curve in curves.items() if curve}
    if not shown:
        return drawings(result)
    return {
        **drawings(result),
        "accuracy-against-size": svg(
            shown, title=f"{next(iter(result))}: accuracy against size",
            across="parameters, relative to dense", up="test accuracy, %",
        ),
    }  # fmt: skip


def drawings(result: dict[str, Measured]) -> dict[str, str]:
    """Return all lines of each task over each cost."""
    drawn = {}
    for task, of in result.items():
        for kind, lines in of["lines"].items():
            curves = {name: _curve(lines.get(name, {})) for name in (ELASTIC, *PER_SIZE)}
            if curves := {name: curve for name, curve in curves.items() if curve}:
                drawn[f"every-size-{_file_name(task)}-{kind}"] = svg(
                    curves, title=f"{task}: accuracy over {NAMES[kind]}",
                    across=f"{NAMES[kind]}, relative to dense", up="test accuracy, %",
                )  # fmt: skip
    return drawn


def _file_name(task: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", task.lower().replace(",000", "000")))


def _curve(line: Line) -> list[tuple[float, float]]:
    known = [(size, _accuracy(seeds)) for size, seeds in line.items() if size != "whole"]
    return sorted((float(size), value) for size, value in known if value is not None)


def markdown(result: dict[str, Measured]) -> str:
    parts = [
        "Test accuracy in % at a share of dense, mean over seeds; – is a size that no model "
        "reaches, or that is not measured. In brackets: by how much `elastic` is above the line, "
        "± the standard error of the difference (spread over seeds, and of both accuracies over "
        "the test samples). `elastic` is one training, cut to each size. `budget` is a training "
        "for each size, `narrower` a narrower dense model for each. Distilled models learn from "
        f"the dense one, for {LONGER:g} times the epochs, like both phases of `elastic`. `SVD of "
        "dense` is one dense training, searched, and healed for one epoch per size. `before` are "
        "the methods that `Elastic` has replaced. Times are those of one machine, and – where a "
        "line was measured on another.",
        "",
    ]
    for task, of in result.items():
        parts += [f"**{task}** ({of['tested']:,} tested). {_whole(of)}", ""]
        for kind, lines in of["lines"].items():
            names = [name for name in (ELASTIC, *PER_SIZE) if name == ELASTIC or lines.get(name)]
            parts += [f"| {NAMES[kind]} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            for size in map(str, SHARES):
                cells = [_cell(of, kind, name, size) for name in names]
                parts.append(f"| {size}× | {' | '.join(cells)} |")
            parts.append("")
        parts += [*_costs(of), ""]
    return "\n".join([*parts, *(f"- {sentence}" for sentence in _bars(result))])


def _cell(of: Measured, kind: str, name: str, size: str) -> str:
    value = _accuracy(_seeds(of, kind, name, size))
    if value is None:
        return "–"
    gap = None if name == ELASTIC else _gap(of, kind, ELASTIC, name, size)
    return f"{value:.2f}" + ("" if gap is None else f" ({gap[0]:+.2f} ± {gap[1]:.2f})")


def _whole(of: Measured) -> str:
    shown = []
    for name in (ELASTIC, DENSE, LONG):
        value = _accuracy(_seeds(of, "params", name, "whole"))
        shown.append(f"{name} {'–' if value is None else f'{value:.2f}'}")
    return f"Whole: {'; '.join(shown)}."


def _costs(of: Measured) -> list[str]:
    """Return a table of what the trainings of each line cost as a whole."""
    rows = ["| trainings of a line | MACs, in dense trainings | seconds |", "|---|---|---|"]
    for name in (ELASTIC, *PER_SIZE, LONG):
        macs, seconds = _cost(of, name)
        if macs is not None:
            shown = "–" if seconds is None else f"{seconds:.0f}"
            rows.append(f"| {name} | {macs:.2f} | {shown} |")
    return rows


def _cost(of: Measured, name: str) -> tuple[float | None, float | None]:
    """Return MACs, in trainings of the dense model, and seconds; None where that is not known."""
    line = of["lines"]["params"].get(name, {})
    dense = _seeds(of, "params", DENSE, "whole")
    if name in (ELASTIC, LONG, OLD_ELASTIC):
        line = {size: seeds for size, seeds in line.items() if size == "whole"}
    if not dense or not any(line.values()):
        return None, None
    of_dense = mean(point["macs"] for point in dense.values())

    def macs(point: Point) -> float:
        share = float(point["macs"] / of_dense)
        if name == DISTILLED:  # a third of a step is the forward that the teacher does too
            return LONGER * (share + 1 / 3)
        if name == SVD:
            return share / int(of["epochs"])
        known = {NARROW: share, LONG: LONGER}
        return known[name] if name in known else float(point["training_macs"])

    total = sum(mean(map(macs, seeds.values())) for seeds in line.values() if seeds)
    known = all("seconds" in p for seeds in line.values() for p in seeds.values())
    spent = (
        sum(mean(p["seconds"] for p in seeds.values()) for seeds in line.values() if seeds)
        if known
        else None
    )
    return total + (name == SVD), spent


def judgement(result: dict[str, Measured]) -> str:
    return " ".join(_bars(result))


def _bars(result: Mapping[str, Measured]) -> Iterator[str]:
    """Yield a sentence for each aim, from the numbers."""
    for name, least in ((NARROW, 0.25), (DISTILLED, 0.25), (OLD_BUDGET, 0.25), (OLD_ELASTIC, 0.0)):
        gaps = _gaps(result, name, least, 0.15 if name == OLD_ELASTIC else 1.0)
        where = "At 0.15 and 0.1" if name == OLD_ELASTIC else "From 0.25 up"
        yield f"{where}, one elastic training against `{name}`: {_counted(gaps)}."
    if perplexities := _perplexities(result):
        where, most = max(perplexities, key=lambda each: each[1])
        yield f"Its perplexity from 0.25 up is at most {most:+.1%} of `{DISTILLED}` ({where})."
    for name in (DENSE, LONG):
        found = {t: _gap(of, "params", ELASTIC, name, "whole") for t, of in result.items()}
        if known := {gap: task for task, gap in found.items() if gap is not None}:
            worst = min(known)
            yield (
                f"Its whole model is at worst {worst[0]:+.2f} ± {worst[1]:.2f} pp relative to "
                f"`{name}` ({known[worst]})."
            )
    svd = _gaps(result, SVD, 0.0)
    yield f"Against `{SVD}`, at all sizes: {_counted(svd)}."
    costs = {cost: task for task, of in result.items() if (cost := _cost(of, ELASTIC)[0])}
    if costs:
        yield f"It costs at most {max(costs):.2f} dense trainings in MACs ({costs[max(costs)]})."
    times = {ratio: task for task, of in result.items() if (ratio := _slower(of))}
    if times:
        yield f"It takes at most {max(times):.2f} times as long as one ({times[max(times)]})."


def _slower(of: Measured) -> float | None:
    """Return the seconds of the elastic training relative to dense ones, if both are measured."""
    mine, dense = (
        [p["seconds"] for p in _seeds(of, "params", name, "whole").values() if "seconds" in p]
        for name in (ELASTIC, DENSE)
    )
    return mean(mine) / mean(dense) if mine and dense else None


def _counted(gaps: Mapping[tuple[str, str, str], tuple[float, float]]) -> str:
    if not gaps:
        return "not measured"
    above = sum(gap > error for gap, error in gaps.values())
    below = sum(gap < -error for gap, error in gaps.values())
    task, kind, size = min(gaps, key=lambda key: gaps[key][0])
    gap, error = gaps[task, kind, size]
    return (
        f"{above} of {len(gaps)} points above, {len(gaps) - above - below} equal within the "
        f"standard error, {below} below; at worst {gap:+.2f} ± {error:.2f} pp ({task}, "
        f"{NAMES[kind]} {size}×)"
    )


def _perplexities(result: Mapping[str, Measured]) -> list[tuple[str, float]]:
    """Return by which share the perplexity is above that of distilled narrower models."""
    found = []
    for task, of in result.items():
        for size in (str(share) for share in SHARES if share >= 0.25):
            mine, theirs = (
                [p["perplexity"] for p in _seeds(of, "params", name, size).values()
                 if "perplexity" in p]
                for name in (ELASTIC, DISTILLED)
            )  # fmt: skip
            if mine and theirs:
                found.append((f"{task}, {size}×", mean(mine) / mean(theirs) - 1))
    return found
