"""Beyond the paper: cutting several layers in a step, compared with one at a time."""

from __future__ import annotations

from typing import Any

from maestro_lod.cli.run import Run
from maestro_lod.cli.trained import Trained, search
from maestro_lod.layers.ranks import at_ranks
from paper.scale import Scale, row

TITLE = "Beyond the paper: layers cut together while training"
MODELS: dict[str, tuple[str, ...]] = {
    "lenet-mnist": ("64e-5", "128e-5"),
    "resnet18-small-cifar10": (),
}
"""Values of λ other than 0, by recipe."""
STRATEGIES: dict[str, dict[str, Any]] = {"pairs": {}, "several": {"sampling": "several"}}
SHARES = (0.5, 1 / 3, 0.25, 0.2, 0.15)


def measure(scale: Scale) -> dict[str, Any]:
    return {
        recipe: {
            strategy: {
                "sizes": _sizes(scale.trained(recipe, penalty=0, **change, seed=0)),
                "penalties": {
                    name: _course(scale.trained(recipe, penalty=name, **change, seed=0))
                    for name in penalties
                },
            }
            for strategy, change in STRATEGIES.items()
        }
        for recipe, penalties in MODELS.items()
    }


def _sizes(run: Run) -> dict[str, Any]:
    """Return the accuracies of a model trained without penalty, by share of its params."""
    trained = Trained.of(run)
    kept = (
        run.directory / "search-params.unfinished"
    )  # takes minutes for the ResNet, so it can be resumed
    found = search(trained, cost="params", until=SHARES[-1], resume=kept)
    reached = {"1.00": trained.test()["accuracy"]}
    for share in SHARES:
        within = [point for point in found if point.params <= share * found.dense.params]
        if within:
            best = min(within, key=lambda point: point.loss)
            with at_ranks(trained.model, best.ranks):
                reached[f"{share:.2f}"] = trained.tested(trained.model)["accuracy"]
    return {"accuracy": reached, "training_macs": row(run)["training_macs"]}


def _course(run: Run) -> dict[str, Any]:
    """Return params after each epoch of a training with a penalty, and its result."""
    return {**row(run), "course": [epoch.params for epoch in run.epochs()]}


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        '`sampling="pairs"` is the paper\'s: each step cuts one layer. `"several"` draws one to as '
        "many pairs as there are layers, so that what is trained is what is deployed: layers cut "
        "together.",
        "",
    ]
    for recipe, strategies in result.items():
        one, many = strategies["pairs"], strategies["several"]
        lines += [
            f"`{recipe}`, λ = 0, test accuracy in % at a share of the params, no training after:",
            "",
            "| sampling | " + " | ".join(f"{s}×" for s in one["sizes"]["accuracy"])
            + " | training MACs |",
            "|---" * (len(one["sizes"]["accuracy"]) + 2) + "|",
            *(
                f"| {strategy} | "
                + " | ".join(f"{100 * a:.2f}" for a in of["sizes"]["accuracy"].values())
                + f" | {of['sizes']['training_macs']:.2f}× |"
                for strategy, of in strategies.items()
            ),
            "",
        ]  # fmt: skip
        if one["penalties"]:
            lines += [
                "With a penalty:",
                "",
                "| λ | sampling | params | accuracy % | training MACs | epochs to as few params |",
                "|---|---|---|---|---|---|",
            ]
        for name, usual in one["penalties"].items():
            for strategy, end in (("pairs", usual), ("several", many["penalties"][name])):
                epochs = _epochs_to(usual["course"][-1], end["course"])
                lines.append(
                    f"| {name} | {strategy} | {end['params']:,} | {100 * end['accuracy']:.2f} "
                    f"| {end['training_macs']:.2f}× | {epochs or 'never'} |"
                )
        lines += ["", _judgement(strategies), ""]
    return "\n".join(lines)


def _epochs_to(params: int, course: list[int]) -> int | None:
    return next((epoch for epoch, size in enumerate(course, 1) if size <= params), None)


def judgement(result: dict[str, Any]) -> str:
    return " ".join(f"`{recipe}`: {_judgement(found)}" for recipe, found in result.items())


def _judgement(strategies: dict[str, Any]) -> str:
    one, many = (strategies[name]["sizes"]["accuracy"] for name in ("pairs", "several"))
    better = [f"{share}×" for share in one if many[share] > one[share]]
    smallest = list(one)[-1]
    falls = [100 * (of[smallest] - of["1.00"]) for of in (one, many)]
    return (
        f"Without a penalty `several` is better at {', '.join(better) or 'no size'}; down to "
        f"{smallest}× accuracy falls by {-falls[1]:.2f} pp with it, by {-falls[0]:.2f} pp with "
        "`pairs`."
    )
