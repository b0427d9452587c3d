"""Beyond the paper: λ without units, over all models that were trained here."""

from __future__ import annotations

from typing import Any

from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.train.lod_settings import LoDSettings
from maestro_lod.train.method import RunPlan
from maestro_lod.train.pressure import penalty_for
from paper import budgets
from paper.scale import Scale, row

TITLE = "Beyond the paper: one scale of λ for all models"


def measure(scale: Scale) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for recipe, asked in budgets.SETTINGS.items():
        runs = {name: scale.trained(recipe, penalty=name, seed=0) for name in asked["penalties"]}
        unit = _penalty_of_one(next(iter(runs.values())))
        result[recipe] = [
            {"penalty": name, "pressure": float(name) / unit, **row(run)}
            for name, run in runs.items()
        ]
    return result


def _penalty_of_one(run: Run) -> float:
    """Return the λ that has a pressure of one in a run."""
    setup, recipe, settings = Setup.of(run.recipe), run.recipe, run.recipe.settings
    assert isinstance(settings, LoDSettings)
    per_epoch = -(-len(setup.data.train) // recipe.accumulate)
    steps = RunPlan(recipe.epochs, per_epoch, setup.schedule).rated_steps
    assert steps is not None
    return penalty_for(1.0, setup.model, setup.optimizer, steps, proximal=settings.proximal)


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "The same trainings as above, by λ and by [pressure](../docs/tuning.md):",
        "",
        "| recipe | λ | pressure | params | accuracy % |",
        "|---|---|---|---|---|",
    ]
    for recipe, rows in result.items():
        lines += [
            f"| `{recipe}` | {r['penalty']} | {r['pressure']:.0f} | {r['relative_params']:.2f}× "
            f"| {100 * r['accuracy']:.2f} |"
            for r in rows
        ]
    return "\n".join([*lines, "", judgement(result)])


def judgement(result: dict[str, Any]) -> str:
    fifths = [both for rows in result.values() if (both := _at_a_fifth(rows)) is not None]
    if not fifths:
        return "No sweep has a fifth of the params."
    penalties, pressures = zip(*fifths, strict=True)
    return (
        f"A fifth of the params is reached at λ between {min(penalties):.1e} and "
        f"{max(penalties):.1e}, a ratio of {max(penalties) / min(penalties):.0f}, and at "
        f"pressures between {min(pressures):.0f} and {max(pressures):.0f}, a ratio of "
        f"{max(pressures) / min(pressures):.1f} ({len(fifths)} of {len(result)} models)."
    )


def _at_a_fifth(rows: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return λ and pressure at which a sweep has a fifth of the params; None if it has not."""
    by_size = sorted((r["relative_params"], float(r["penalty"]), r["pressure"]) for r in rows)
    pressure = budgets.at_size([(size, p) for size, _, p in by_size], 0.2)
    penalty = budgets.at_size([(size, p) for size, p, _ in by_size], 0.2)
    return None if pressure is None or penalty is None else (penalty, pressure)
