"""Which search finds the best submodels, and how much less does it run than the naive one?

    lod train resnet18-small-cifar10 --set penalty=0 --out runs/ordered
    lod train resnet18-small-cifar10 --set method=dense --out runs/dense
    python benchmarks/frontier.py runs/ordered [runs/dense]
    python benchmarks/frontier.py --replay runs/ordered runs/other ...

The naive search is the paper's: before each cut it evaluates every candidate with a whole forward.
Layer evaluations are forwards of single low-rank layers that really ran. The dense model is
decomposed by SVD; there the naive search is left out. With --replay nothing but the use of
remembered outputs is measured: CPU time of the same search with and without it, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from interleaved import RESULTS, write
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.cli.run import Run
from maestro_lod.cli.trained import Trained
from maestro_lod.layers import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs
from maestro_lod.model.macs import dense_macs
from maestro_lod.sizes.frontier_search import Frontier, frontier
from maestro_lod.sizes.replay import batch_statistics
from maestro_lod.sizes.strategies import METHODS

SAMPLES, TEST, UNTIL = 256, 10_000, 0.25
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
Loss = Callable[[nn.Module], Tensor]
Found = TypeVar("Found")


def tensors(batches: Any, samples: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` inputs and targets of some batches as two tensors."""
    torch.manual_seed(0)
    parts, count = [], 0
    for x, y in batches:
        parts.append((x, y))
        count += len(y)
        if count >= samples:
            break
    x, y = (torch.cat(part)[:samples] for part in zip(*parts, strict=True))
    return x, y


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count how often a low-rank layer computes inside the `with` block."""
    count, factors = [0], LowRank._active_factors

    def active_factors(layer: LowRank) -> tuple[Tensor, Tensor]:
        count[0] += 1
        return factors(layer)

    LowRank._active_factors = active_factors  # type: ignore[method-assign]
    try:
        yield count
    finally:
        LowRank._active_factors = factors  # type: ignore[method-assign]


def naive(model: nn.Module, loss: Loss, costs: Costs) -> list[dict[str, int]]:
    """The paper's search: of all layers, cut the one by a tenth whose cut raises the loss least."""
    shapes = {name: layer.matrix_shape for name, layer in low_rank_layers(model).items()}

    def cut(name: str, rank: int) -> int:
        m, n = shapes[name]
        return min(int(0.9 * rank + 1e-9), (m * n - 1) // (m + n))

    ranks = lod.ranks(model)
    found = [ranks]
    while (costs.at(ranks).macs or 0) > UNTIL * (costs.dense.macs or 0):
        losses = {}
        for name, rank in ranks.items():
            if cut(name, rank) >= 1:
                with batch_statistics(model), lod.at_ranks(model, {**ranks, name: cut(name, rank)}):
                    losses[name] = loss(model).item()
        best = min(losses, key=losses.__getitem__)
        ranks = {**ranks, best: cut(best, ranks[best])}
        found.append(ranks)
    return found


def measured(search: Callable[[], Found]) -> tuple[Found, dict[str, float]]:
    with counted() as count:
        start = time.perf_counter()
        found = search()
        seconds = time.perf_counter() - start
    return found, {"layer_evaluations": count[0], "seconds": seconds}


def at_shares(found: Frontier, model: nn.Module, x: Tensor, y: Tensor) -> Frontier:
    """Return the best submodels at some shares of the dense MACs, with their test accuracy."""
    points = []
    for share in SHARES:
        point = found.point(max_macs=share)
        with batch_statistics(model), lod.at_ranks(model, point.ranks):
            hits = [
                (model(part).argmax(1) == target).sum().item()
                for part, target in zip(x.split(1000), y.split(1000), strict=True)
            ]
        points.append(replace(point, accuracy=sum(hits) / len(y)))
    return replace(found, points=tuple(points))


def searches(
    model: nn.Module, loss: Loss, example: Tensor, *, also_naive: bool
) -> tuple[dict[str, Frontier], dict[str, dict[str, float]]]:
    """Run every search; return what each found and what it cost."""
    found: dict[str, Frontier] = {}
    costs: dict[str, dict[str, float]] = {}

    def search(**options: Any) -> Frontier:
        return frontier(model, loss, example=example, until=UNTIL, **options)

    for method in METHODS:
        found[method], costs[method] = measured(partial(search, method=method))
    if also_naive:
        table = Costs(model, dense_macs(model, example))
        ranks, costs["naive"] = measured(partial(naive, model, loss, table))
        found["naive"] = search(ranks=ranks[1:])
    for name, result in found.items():
        costs[name]["submodels"] = len(result)
    return found, costs


def report(kind: str, found: dict[str, Frontier], costs: dict[str, dict[str, float]]) -> Any:
    """Print and return costs, and quality at each share; relative to the naive search if it ran."""
    print(f"{kind}: accuracy in % (loss of the searched batch) at a share of the dense MACs")
    print(f"{'':12s}" + "".join(f"{share:>14}" for share in SHARES))
    for name, result in found.items():
        cells = (f"{100 * (p.accuracy or 0):6.2f} ({p.loss:5.3f})" for p in result)
        print(f"{name:12s}" + "".join(f"{cell:>14}" for cell in cells))
    for name, cost in costs.items():
        if "naive" in costs:
            cost["fewer layer evaluations"] = (
                costs["naive"]["layer_evaluations"] / cost["layer_evaluations"]
            )
            cost["faster"] = costs["naive"]["seconds"] / cost["seconds"]
        if "naive" in found and name in found:
            pairs = zip(found[name], found["naive"], strict=True)
            cost["least accuracy gained"] = min(
                (a.accuracy or 0) - (b.accuracy or 0) for a, b in pairs
            )
        print(f"  {name:14s}" + ", ".join(f"{key} {value:.4g}" for key, value in cost.items()))
    quality = {
        name: {
            str(s): {"loss": p.loss, "accuracy": p.accuracy} for s, p in zip(SHARES, f, strict=True)
        }
        for name, f in found.items()
    }
    return {"searches": costs, "at a share of the MACs": quality}


def replayed(directory: Path, rounds: int = 3) -> dict[str, dict[str, float]]:
    """Time searches of a run's model with outputs remembered and without, in turn."""
    trained = Trained.of(Run.open(directory))
    x, y = tensors(trained.data.train, SAMPLES)
    answer = {}
    for method in ("look-ahead", "greedy"):
        seconds: dict[int, list[float]] = {2**31: [], 0: []}
        found = {}
        for _ in range(rounds):
            for memory, times in seconds.items():
                start = time.process_time()
                found[memory] = frontier(
                    trained.model, lambda m: F.cross_entropy(m(x), y), example=x[:1], until=UNTIL,
                    method=method, memory=memory,
                )  # fmt: skip
                times.append(time.process_time() - start)
        assert [p.ranks for p in found[0]] == [p.ranks for p in found[2**31]]
        with_it, without = (statistics.median(times) for times in seconds.values())
        answer[method] = {"CPU s": with_it, "without": without, "saves": without / with_it}
        print(f"{directory}, {method}: {answer[method]}", flush=True)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ordered", type=Path, nargs="?", help="a run without penalty")
    parser.add_argument("dense", type=Path, nargs="?", help="a dense run of the same recipe")
    parser.add_argument("--replay", type=Path, nargs="+", help="runs: measure remembering alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay:
        recipes = {path: Run.open(path).recipe.recipe for path in options.replay}
        write("replay", {recipes[path]: replayed(path) for path in options.replay})
        return
    answer: dict[str, Any] = {"samples of the search": SAMPLES, "test samples": TEST}
    runs = {"low-rank training": options.ordered, "SVD of dense": options.dense}
    for kind, directory in runs.items():
        if directory is None:
            continue
        trained = Trained.of(Run.open(directory))
        model, low_rank = trained.model, kind == "low-rank training"
        x, y = tensors(trained.data.train, SAMPLES)
        answer["recipe"] = trained.run.recipe.recipe
        found, costs = searches(
            model, lambda m, x=x, y=y: F.cross_entropy(m(x), y), x[:1], also_naive=low_rank
        )
        test = tensors(trained.data.test, TEST)
        found = {method: at_shares(result, model, *test) for method, result in found.items()}
        answer[kind] = report(kind, found, costs)
        if low_rank:
            first, *others = found
            found[first].plot(RESULTS / "frontier.svg", others={n: found[n] for n in others})
    write("frontier", answer)


if __name__ == "__main__":
    main()
