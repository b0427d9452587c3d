"""Beyond the paper: trainings to a budget, compared with a sweep of λ at the same size."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from maestro_lod.model.plot import svg
from paper.scale import Scale, row

TITLE = "Beyond the paper: a budget instead of λ"
SETTINGS: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {
    "lenet-mnist": {
        "budgets": {"0.1": (0, 1, 2), "0.2": (0, 1, 2), "0.4": (0, 1, 2)},
        "penalties": {
            "8e-5": (0,), "16e-5": (0,), "32e-5": (0,), "64e-5": (0,), "128e-5": (0,),
            "256e-5": (0,), "512e-5": (0,),
        },
    },
    "resnet18-small-cifar10": {
        "budgets": {"0.1": (0,), "0.3": (0, 1)},
        "penalties": {"2e-4": (0,), "4e-4": (0, 1), "8e-4": (0,), "32e-4": (0,)},
    },
    "paper/nn-transformer.yaml": {
        "budgets": {"0.1": (0,), "0.3": (0,)},
        "penalties": {"0.1": (0,), "0.2": (0,), "0.4": (0,), "0.8": (0,)},
    },
}  # fmt: skip
"""Recipe -> budget or λ -> seeds."""


def measure(scale: Scale) -> dict[str, Any]:
    return {
        recipe: {
            "sweep": {
                penalty: [row(scale.trained(recipe, penalty=penalty, seed=s)) for s in seeds]
                for penalty, seeds in asked["penalties"].items()
            },
            "budgets": {
                budget: [row(scale.trained(recipe, budget__params=budget, seed=s)) for s in seeds]
                for budget, seeds in asked["budgets"].items()
            },
        }
        for recipe, asked in SETTINGS.items()
    }


Point = tuple[float, float]


def curve(groups: dict[str, list[dict[str, Any]]]) -> list[Point]:
    """Return the mean (relative params, accuracy in %) of each group of runs, small to large."""
    return sorted(
        (mean(r["relative_params"] for r in rows), 100 * mean(r["accuracy"] for r in rows))
        for rows in groups.values()
    )


def at_size(sweep: list[Point], size: float) -> float | None:
    """Return the accuracy of a sweep at a size: linear in its logarithm, None outside of it."""
    for (small, low), (large, high) in pairwise(sweep):
        if small <= size <= large:
            return low + (high - low) * math.log(size / small) / math.log(large / small)
    return None


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {
        f"budgets-{Path(recipe).stem}": svg(
            {"sweep of λ": curve(measured["sweep"]), "budget": curve(measured["budgets"])},
            title=f"{Path(recipe).stem}: accuracy over params",
            across="params, relative to dense",
            up="test accuracy, %",
        )
        for recipe, measured in result.items()
    }


def markdown(result: dict[str, Any]) -> str:
    lines = []
    for recipe, measured in result.items():
        sweep = curve(measured["sweep"])
        lines += [
            f"`lod train {recipe} --set budget.params=…`:",
            "",
            "| budget | used, by seed | accuracy % | sweep of λ at that size, % |",
            "|---|---|---|---|",
        ]
        for budget, rows in measured["budgets"].items():
            accuracy, swept = _against_sweep(rows, sweep)
            lines.append(
                f"| {budget} | {', '.join(f'{share:.1%}' for share in _used(budget, rows))} "
                f"| {accuracy:.2f} | {'smaller than any' if swept is None else f'{swept:.2f}'} |"
            )
        lines += ["", _judgement(measured), ""]
    return "\n".join(lines)


def judgement(result: dict[str, Any]) -> str:
    return " ".join(f"`{Path(recipe).stem}`: {_judgement(of)}" for recipe, of in result.items())


def _judgement(measured: dict[str, Any]) -> str:
    budgets, sweep = measured["budgets"], curve(measured["sweep"])
    within = all(0.95 <= share <= 1.0 for b, rows in budgets.items() for share in _used(b, rows))
    landed = "Every training ends" if within else "Not every training ends"
    pairs = [_against_sweep(rows, sweep) for rows in budgets.values()]
    gaps = ", ".join(f"{mine - swept:+.2f}" for mine, swept in pairs if swept is not None)
    against = f" Against the sweep: {gaps} pp." if gaps else ""
    return f"{landed} within 5 % below its budget.{against}"


def _used(budget: str, rows: list[dict[str, Any]]) -> list[float]:
    """Return the share of a budget that each training has used."""
    return [row["relative_params"] / float(budget) for row in rows]


def _against_sweep(rows: list[dict[str, Any]], sweep: list[Point]) -> tuple[float, float | None]:
    """Return mean accuracies in %: of trainings, and of the sweep at their mean size."""
    size = mean(row["relative_params"] for row in rows)
    return 100 * mean(row["accuracy"] for row in rows), at_size(sweep, size)
