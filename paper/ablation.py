"""Table 4: what penalty, shrinking and sampling each contribute."""

from __future__ import annotations

from typing import Any

import maestro_lod as lod
from maestro_lod.cli.run import Run
from maestro_lod.cli.trained import Trained
from maestro_lod.train.lod_settings import LoDSettings
from paper.published import ABLATION
from paper.scale import Scale, row

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
            name: _row(scale.trained(recipe, **{"penalty": penalty, **change, "seed": 0}))
            for name, change in CHANGES.items()
        }
        for recipe, penalty in MODELS.items()
    }


def _row(run: Run) -> dict[str, Any]:
    """Return the numbers of a run; one that did not shrink is cut at its end by the threshold."""
    settings = run.recipe.settings
    assert isinstance(settings, LoDSettings)
    if settings.shrink:
        return row(run)
    trained = Trained.of(run)
    lod.shrink(trained.model, threshold=settings.threshold)
    costs = lod.summary(trained.model, trained.data.example)
    return row(run) | {
        **trained.tested(trained.model),
        "params": costs.fused_params,
        "macs": costs.fused_macs,
        "relative_params": costs.fused_params / costs.dense_params,
        "relative_macs": costs.fused_macs / costs.dense_macs,
    }


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = []
    for recipe, variants in result.items():
        cost = variants["Maestro"]["training_macs"]
        lines += [
            f"`{recipe}`, λ = {MODELS[recipe]}, one seed:",
            "",
            "| variant | accuracy % | training MACs | paper | params | paper |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {100 * run['accuracy']:.2f} "
                f"| {run['training_macs'] / cost:.2f}× | {ABLATION[name][1]:.2f}× "
                f"| {run['relative_params']:.2f}× | {ABLATION[name][2]:.2f}× |"
                for name, run in variants.items()
            ),
            "",
            _judgement(variants),
            "",
        ]
    return "\n".join(lines)


def judgement(result: dict[str, Any]) -> str:
    return " ".join(f"`{recipe}`: {_judgement(variants)}" for recipe, variants in result.items())


def _judgement(variants: dict[str, Any]) -> str:
    whole = variants["Maestro"]
    dearer = [r for r in variants.values() if r["training_macs"] > whole["training_macs"]]
    best = max(variants, key=lambda name: variants[name]["accuracy"])
    behind = 100 * (whole["accuracy"] - variants[best]["accuracy"])
    return (
        f"Cheaper to train than {len(dearer)} of the 3 variants (in the paper: all 3), at "
        f"{behind:+.2f} pp from the most accurate one ({best})."
    )
