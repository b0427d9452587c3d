"""Tables 11 and 12, scaled down: smaller ResNet-18 and VGG-19 on CIFAR-10, dense and five λ."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from paper.published import CIFAR_EPOCHS, RESNET, VGG
from paper.scale import Scale, row

TITLE = "Tables 11 and 12, scaled down: ResNet-18 and VGG-19 on CIFAR-10 for different λ"
LAMBDAS = ("2e-4", "4e-4", "8e-4", "16e-4", "32e-4")
MODELS = {"resnet18-small-cifar10": RESNET, "vgg19-small-cifar10": VGG}


def measure(scale: Scale) -> dict[str, Any]:
    return {
        recipe: {
            "dense": row(scale.trained(recipe, method="dense", seed=0)),
            **{
                name: row(scale.trained(recipe, penalty=name, seed=0))
                for name in scale.some(LAMBDAS)
            },
        }
        for recipe in MODELS
    }


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "The models have a quarter of the paper's width and work at half the resolution; they "
        "train for few epochs, so λ is larger: what counts is λ times the steps. The paper's rows "
        "next to ours are those of the nearest size.",
        "",
    ]
    for recipe, rows in result.items():
        epochs = rows["dense"]["epochs"]
        lines += [
            f"`{recipe}`, {epochs} epochs, one seed:",
            "",
            "| λ | accuracy % | MACs | params | training MACs, params "
            "| paper, λ | accuracy % | MACs | params | training MACs, params |",
            "|---" * 10 + "|",
        ]
        for name, mine in rows.items():
            other, theirs = _nearest(name, mine["relative_params"], MODELS[recipe])
            lines.append(
                f"| {name} | {100 * mine['accuracy']:.2f} | {mine['relative_macs']:.2f}× "
                f"| {mine['relative_params']:.2f}× | {mine['training_macs']:.2f}×, "
                f"{mine['training_params']:.2f}× | {other} | {theirs[0]:.2f} | {theirs[1]:.2f}× "
                f"| {theirs[2]:.2f}× | {theirs[3]:.2f}×, {theirs[4]:.2f}× |"
            )
        lines += ["", _judgement(rows, MODELS[recipe]), ""]
    return "\n".join(lines)


Published = dict[str, tuple[float, float, float, float, float]]


def _nearest(
    name: str, params: float, table: Published
) -> tuple[str, tuple[float, float, float, float, float]]:
    if name == "dense":
        return name, table[name]
    low_rank = {key: value for key, value in table.items() if key != "dense"}
    other = min(low_rank, key=lambda key: abs(low_rank[key][2] - params))
    return other, low_rank[other]


def judgement(result: dict[str, Any]) -> str:
    return " ".join(
        f"`{recipe}`: {_judgement(rows, MODELS[recipe])}" for recipe, rows in result.items()
    )


def _judgement(rows: dict[str, Any], published: Published) -> str:
    mine = [(100 * r["accuracy"], r["relative_params"]) for r in rows.values()]
    theirs = [(accuracy, params) for accuracy, _, params, *_ in published.values()]
    return (
        f"Here {_ordering(mine)}. In the paper {_ordering(theirs)} (after "
        f"{CIFAR_EPOCHS} epochs instead of {rows['dense']['epochs']})."
    )


def _ordering(rows: list[tuple[float, float]]) -> str:
    """Describe size and accuracy over λ, given (accuracy, params) of dense and growing λ."""
    (dense, _), *trained = rows
    smaller = all(b[1] <= a[1] for a, b in pairwise(trained))
    rises = sum(b[0] > a[0] for a, b in pairwise(trained))
    smallest = min((params for accuracy, params in trained if accuracy >= dense), default=None)
    return (
        f"a larger λ {'always' if smaller else 'not always'} gives a smaller model, and a more "
        f"accurate one in {rises} of {len(trained) - 1} steps; "
        + (
            "no size reaches the accuracy of dense"
            if smallest is None
            else f"down to {smallest:.2f}× of the params one is at least as accurate as dense"
        )
    )
