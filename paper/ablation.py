"""Table 4: what penalty, shrinking and sampling each contribute."""

from __future__ import annotations

from statistics import mean
from typing import Any

from paper.published import ABLATION
from paper.scale import Scale, row, spread

TITLE = "Table 4: what each part contributes (paper: ResNet-18; here: LeNet, small ResNet)"
MODELS = {"lenet-mnist": "64e-5", "resnet18-small-cifar10": "8e-4"}
"""Recipe -> λ."""
CHANGES: dict[str, dict[str, Any]] = {
    "Maestro": {},
    "without penalty": {"penalty": 0},
    "without shrinking": {"shrink": False},
    "with a full pass": {"full_pass": True},
}


def measure(scale: Scale) -> dict[str, Any]:
    return {
        recipe: {
            name: [row(scale.trained(recipe, **{"penalty": penalty, **change, "seed": seed}))
                   for seed in (scale.seeds if recipe == "lenet-mnist" else (0,))]
            for name, change in CHANGES.items()
        }
        for recipe, penalty in MODELS.items()
    }  # fmt: skip


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = []
    for recipe, variants in result.items():
        cost = _cost(variants)
        lines += [
            f"`{recipe}`, λ = {MODELS[recipe]}, {len(variants['Maestro'])} seeds:",
            "",
            "| variant | accuracy % | training MACs | paper | params | paper |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {spread([100 * run['accuracy'] for run in runs])} "
                f"| {cost[name] / cost['Maestro']:.2f}× | {ABLATION[name][1]:.2f}× "
                f"| {mean(run['relative_params'] for run in runs):.2f}× "
                f"| {ABLATION[name][2]:.2f}× |"
                for name, runs in variants.items()
            ),
            "",
            _judgement(variants),
            "",
        ]
    return "\n".join(lines)


def judgement(result: dict[str, Any]) -> str:
    return " ".join(f"`{recipe}`: {_judgement(variants)}" for recipe, variants in result.items())


def _judgement(variants: dict[str, Any]) -> str:
    cost = _cost(variants)
    accuracy = {
        name: 100 * mean(run["accuracy"] for run in runs) for name, runs in variants.items()
    }
    dearer = [name for name in cost if cost[name] > cost["Maestro"]]
    best = max(accuracy, key=lambda name: accuracy[name])
    return (
        f"Cheaper to train than {len(dearer)} of the 3 variants (in the paper: all 3), at "
        f"{accuracy['Maestro'] - accuracy[best]:+.2f} pp from the most accurate one ({best})."
    )


def _cost(variants: dict[str, Any]) -> dict[str, float]:
    """Return the MACs of training each variant, relative to dense."""
    return {name: mean(run["training_macs"] for run in runs) for name, runs in variants.items()}
