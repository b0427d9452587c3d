"""Figure 3 and Tables 1 to 3 and 15, scaled down: all methods on one task, on equal terms."""

from __future__ import annotations

import sys
from typing import Any

from maestro_lod.baselines.compare import Comparison, Row, compare
from maestro_lod.baselines.compare.comparison_text import (
    cost_texts,
    describe_conditions,
    describe_front,
    describe_winner,
    score_text,
    size_text,
    sorted_rows,
)
from maestro_lod.baselines.compare.page import page
from maestro_lod.cli.report.text import times
from paper.published import COMPARED
from paper.scale import Scale

TITLE = "Figure 3 and Tables 1 to 3 and 15, scaled down: all methods on LeNet and MNIST"
METHODS = (
    "dense", "svd", "lod", "elastic", "narrow", "pufferfish", "svd-finetuned", "spectral",
    "cuttlefish", "imp", "raregems", "xnor",
)  # fmt: skip
SIZES = (0.25, 0.1)


def measure(scale: Scale) -> dict[str, Any]:
    return compared(scale, "lenet-mnist", seeds=3, lr_trials=3, lr_epochs=3)


def compared(
    scale: Scale,
    recipe: str,
    *,
    sizes: tuple[float, ...] = SIZES,
    seeds: int,
    lr_trials: int,
    lr_epochs: int | None = None,
    changes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Compare all methods on a recipe, or a few of them in a smoke test."""
    few = ("epochs=2", "data.limit=512", "schedule=constant")
    found = compare(
        recipe,
        ("dense", "svd", "narrow") if scale.smoke else METHODS,
        sizes=sizes[:1] if scale.smoke else sizes,
        out=scale.runs / "compare" / recipe,
        seeds=1 if scale.smoke else seeds,
        lr_trials=1 if scale.smoke else lr_trials,
        lr_epochs=lr_epochs,
        changes=["threads=1", *(few if scale.smoke else changes)],
        say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
    )
    return found.to_dict()


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def pages(result: dict[str, Any]) -> dict[str, str]:
    found = Comparison.from_dict(result)
    return {_page(found): page(found)}


def _page(found: Comparison) -> str:
    return f"compare-{found.recipe}"


def markdown(result: dict[str, Any]) -> str:
    found = Comparison.from_dict(result)
    lines = [
        f"{describe_conditions(found)} [As a page](results/{_page(found)}.html). The paper has "
        "these methods "
        "on other models, each at a size of its own; its numbers are here for their order.",
        "",
        "| size | method | params | MACs | bytes | training | test accuracy "
        + "".join(f"| paper: {model} " for model in COMPARED)
        + "|",
        "|---" * (7 + len(COMPARED)) + "|",
    ]
    for row in sorted_rows(found):
        params, macs, size, _, training = cost_texts(found, row)
        cells = [size_text(row), row.method, params, macs, size, training, score_text(found, row)]
        lines.append(f"| {' | '.join([*cells, *_printed(row.method)])} |")
    said = [
        *(describe_winner(found, winner) for winner in found.winners),
        describe_front(found),
        judgement(result),
    ]
    lines += ["", *(f"{sentence}\n" for sentence in said)]
    lines += [f"Missing: {what}: {reason}\n" for what, reason in found.missing]
    return "\n".join(lines)


def _printed(method: str) -> list[str]:
    """Return accuracy and size of a method as the paper prints them, for each model."""
    known = [table.get(method) for table in COMPARED.values()]
    return ["–" if it is None else f"{it[0]:.2f} % at {times(it[1])}" for it in known]


def judgement(result: dict[str, Any]) -> str:
    """Describe for which methods the order of the paper, relative to Maestro, holds here."""
    found = Comparison.from_dict(result)
    groups: dict[str, list[str]] = {"holds": [], "is the other way round": [], "depends": []}
    for method in METHODS:
        theirs = {
            table["lod"][0] > table[method][0]
            for table in COMPARED.values()
            if method != "lod" and method in table
        }
        ours = {ours.mean > other.mean for ours, other in _pairs(found, method)}
        if not theirs or not ours:
            continue
        if len(theirs) > 1 or len(ours) > 1:
            groups["depends"].append(method)
        else:
            groups["holds" if theirs == ours else "is the other way round"].append(method)
    said = [
        f"the order of Maestro and {', '.join(methods)} {_ENDS[kind]}"
        for kind, methods in groups.items()
        if methods
    ]
    unpublished = [
        f"{method} (which the paper does not have) beats it at {wins} of {len(pairs)} sizes"
        for method in ("narrow", "svd")
        if (pairs := _pairs(found, method))
        for wins in [sum(other.mean > ours.mean for ours, other in pairs)]
    ]
    said += unpublished
    return f"On equal terms ({found.recipe}, seeds: {found.seeds}): {'; '.join(said)}."


_ENDS = {
    "holds": "is the paper's",
    "is the other way round": "is the other way round",
    "depends": "depends on the size here, or on the model in the paper",
}


def _pairs(found: Comparison, method: str) -> list[tuple[Row, Row]]:
    """Return pairs of our rows and those of another method of the same size."""
    ours = {row.size: row for row in found.rows if row.method == "lod"}
    others = [row for row in found.rows if row.method == method]
    if not ours:
        return []
    largest = max(ours.values(), key=lambda row: row.share)
    return [(ours.get(row.size, largest), row) for row in others]
