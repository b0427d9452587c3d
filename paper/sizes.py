"""Figures 5a to c and 11 to 13 for LeNet: every size of one model, without training again."""

from __future__ import annotations

from typing import Any

from maestro_lod.cli.run import Run
from maestro_lod.cli.trained import Trained, search
from maestro_lod.layers.ranks import at_ranks
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.plot import svg
from paper.published import LENET
from paper.scale import Scale, row

TITLE = "Figures 5 and 11 to 13: LeNet cut to size, against SVD of the dense model"
SHARES = (0.75, 0.5, 1 / 3, 0.25, 0.2, 0.15)
SEARCHES = {"macs": "greedy", "params": "look-ahead"}
"""Search by cost: the paper's for its figures, look-ahead for sizes in params."""

PAIRS, SEVERAL, SVD = "λ = 0", "λ = 0, sampling several", "SVD of dense"

Curve = list[dict[str, Any]]


def measure(scale: Scale) -> dict[str, Any]:
    models = {
        PAIRS: Trained.of(scale.trained("lenet-mnist", penalty=0, seed=0)),
        SEVERAL: Trained.of(scale.trained("lenet-mnist", penalty=0, sampling="several", seed=0)),
        SVD: Trained.of(scale.trained("lenet-mnist", method="dense", seed=0)),
    }
    ordered = models[PAIRS]
    others = {
        name: scale.trained("lenet-mnist", penalty=name, seed=0)
        for name in LENET
        if name not in ("dense", "0")
    }
    nested = search(ordered, ranks=[_ranks(run) for run in others.values()])
    return {
        "curves": {
            cost: {
                name: _tested(trained, search(trained, cost=cost, method=method))
                for name, trained in models.items()
            }
            for cost, method in SEARCHES.items()
        },
        "trained": {name: row(run) for name, run in others.items()},
        "nested": dict(zip(others, _tested(ordered, nested)[1:], strict=True)),  # whole comes first
        "full": {name: t.test()["accuracy"] for name, t in models.items()},
        "dense": {"params": nested.dense.params, "macs": nested.dense.macs},
    }


def _ranks(run: Run) -> dict[str, int]:
    return {layer["name"]: layer["rank"] for layer in run.result()["summary"]["layers"]}


def _tested(trained: Trained, found: Frontier) -> Curve:
    """Return the points of a search with the accuracy that each has on the test set."""
    curve = []
    for point in found:
        with at_ranks(trained.model, point.ranks):
            reached = trained.test()
        curve.append(
            {
                "params": point.params,
                "macs": point.macs,
                "loss": point.loss,
                "accuracy": reached["accuracy"],
                "ranks": point.ranks,
            }
        )
    return curve


def at_most(curve: Curve, cost: str, limit: float) -> dict[str, Any] | None:
    """Return the size within a limit that has the least loss on the samples of the search."""
    within = [point for point in curve if point[cost] <= limit]
    return min(within, key=lambda point: point["loss"], default=None)


def figures(result: dict[str, Any]) -> dict[str, str]:
    dense, drawings = result["dense"], {}
    for cost, curves in result["curves"].items():
        lines = {name: _relative(curve, cost, dense) for name, curve in curves.items()}
        if cost == "params":
            trained = list(result["trained"].values())
            lines["λ > 0, trained one by one"] = _relative(trained, cost, dense)
            lines["λ = 0 at their ranks"] = _relative(result["nested"].values(), cost, dense)
        drawings[f"sizes-{cost}"] = svg(
            lines, title=f"LeNet on MNIST: accuracy over {NAMES[cost]}, one training each",
            across=f"{NAMES[cost]}, relative to dense", up="test accuracy, %",
        )  # fmt: skip
    return drawings


NAMES = {"macs": "MACs", "params": "params"}


def _relative(curve: Any, cost: str, dense: dict[str, int]) -> list[tuple[float, float]]:
    points = [(point[cost] / dense[cost], 100 * point["accuracy"]) for point in curve]
    best = max(accuracy for _, accuracy in points)
    return [point for point in points if point[1] >= best - 15]  # below, models are of no use


def _accuracy(point: dict[str, Any] | None) -> float:
    return 0.0 if point is None else point["accuracy"]


def markdown(result: dict[str, Any]) -> str:
    lines = ["Test accuracy in % (and what it costs) of a model cut to a share of dense:", ""]
    for cost, curves in result["curves"].items():
        lines += [f"| {NAMES[cost]} ≤ | {' | '.join(curves)} |", "|---" * (len(curves) + 1) + "|"]
        for share in SHARES:
            limit = share * result["dense"][cost]
            best = [at_most(curve, cost, limit) for curve in curves.values()]
            shown = [
                "–" if point is None else f"{100 * point['accuracy']:.2f} ({point[cost]:,})"
                for point in best
            ]
            lines.append(f"| {share:.2f}× | {' | '.join(shown)} |")
        lines.append("")
    lines += [
        judgement(result),
        "",
        "The ranks of models trained with λ > 0, given to the one with λ = 0 (Figures 5c, 13):",
        "",
        "| ranks of λ | params | trained with it, % | λ = 0 at its ranks, % |",
        "|---|---|---|---|",
        *(
            f"| {name} | {point['params']:,} | {100 * result['trained'][name]['accuracy']:.2f} "
            f"| {100 * point['accuracy']:.2f} |"
            for name, point in result["nested"].items()
        ),
    ]
    return "\n".join(lines)


def judgement(result: dict[str, Any]) -> str:
    sentences, params = [], result["dense"]["params"]
    for name in (PAIRS, SEVERAL):
        won = [
            _best(result, name, cost, share) > _best(result, SVD, cost, share)
            for cost in result["curves"]
            for share in SHARES
        ]
        third = 100 * _accuracy(at_most(result["curves"]["params"][name], "params", params / 3))
        full = 100 * result["full"][name]
        sentences.append(
            f"{name}: better than SVD of the dense model at {sum(won)} of {len(won)} sizes; at a "
            f"third of the params {third:.2f} %, whole {full:.2f} % ({third - full:+.2f} pp)."
        )
    return " ".join(sentences)


def _best(result: dict[str, Any], name: str, cost: str, share: float) -> float:
    limit = share * result["dense"][cost]
    return _accuracy(at_most(result["curves"][cost][name], cost, limit))
