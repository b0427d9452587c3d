"""Figures 4 and 8 to 10 for LeNet: ranks while training, ranks per layer, convergence at λ = 0."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from maestro_lod.model.plot import svg
from paper.published import LENET
from paper.scale import Scale

TITLE = "Figures 4, 8, 9 and 10: how LeNet's ranks develop"
LAMBDAS = [name for name in LENET if name != "dense"]


def measure(scale: Scale) -> dict[str, Any]:
    runs = {name: scale.trained("lenet-mnist", penalty=name, seed=0) for name in LAMBDAS}
    dense = scale.trained("lenet-mnist", method="dense", seed=0)
    curves = {name: run.epochs() for name, run in runs.items()}
    return {
        "total_rank": {
            name: [sum(epoch.ranks.values()) for epoch in epochs] for name, epochs in curves.items()
        },
        "ranks": {name: dict(epochs[-1].ranks) for name, epochs in curves.items()},
        "full_ranks": runs["0"].result()["full_ranks"],
        "train_loss": {
            "dense": [epoch.train["loss"] for epoch in dense.epochs()],
            "λ = 0": [epoch.train["loss"] for epoch in curves["0"]],
        },
    }


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {
        "dynamics-total-rank": svg(
            {f"λ = {name}": _curve(totals) for name, totals in result["total_rank"].items()},
            title="LeNet on MNIST: total rank while training", across="epoch", up="total rank",
        ),
        "dynamics-convergence": svg(
            {name: _curve(losses) for name, losses in result["train_loss"].items()},
            title="LeNet on MNIST: training loss", across="epoch", up="mean loss of an epoch",
        ),
    }  # fmt: skip


def _curve(values: list[float]) -> list[tuple[float, float]]:
    return [(epoch, value) for epoch, value in enumerate(values, 1)]


def markdown(result: dict[str, Any]) -> str:
    layers = list(result["full_ranks"])
    lines = [
        f"| λ | {' | '.join(layers)} | total |",
        "|---" * (len(layers) + 2) + "|",
        *(
            f"| {name} | {' | '.join(str(ranks[layer]) for layer in layers)} "
            f"| {sum(ranks.values())} |"
            for name, ranks in result["ranks"].items()
        ),
    ]
    dense, ordered = (losses[-1] for losses in result["train_loss"].values())
    settled = {
        name: next(i for i, total in enumerate(totals, 1) if total == totals[-1])
        for name, totals in result["total_rank"].items()
    }
    latest = max((n for n in settled if n != "0"), key=lambda n: settled[n])
    return "\n".join(
        [
            "Ranks after training, for growing λ (Figures 4b and 9):",
            "",
            *lines,
            "",
            f"{judgement(result)} The last rank goes in epoch {settled[latest]} (λ = {latest}). "
            f"At λ = 0 the training loss ends at {ordered:.4f}, that of the dense model at "
            f"{dense:.4f}: it is the loss of sampled submodels, which is higher by construction.",
        ]
    )


def judgement(result: dict[str, Any]) -> str:
    if exceptions := _not_nested(result["ranks"]):
        return f"The ranks are nested but for {', '.join(exceptions)}."
    return "The ranks are nested, as in the paper: no layer grows as λ does."


def _not_nested(ranks: dict[str, dict[str, int]]) -> list[str]:
    """Return where a layer has more ranks under a larger λ."""
    return [
        f"{layer} ({ranks[small][layer]} at {small}, {ranks[large][layer]} at {large})"
        for small, large in pairwise(ranks)
        for layer in ranks[small]
        if ranks[large][layer] > ranks[small][layer]
    ]
