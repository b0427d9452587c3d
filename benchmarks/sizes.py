"""Which sizes does one training give, and how good are they? Ordered ranks beside SVD of dense.

    lod train lenet-mnist --set penalty=0 --out runs/ordered
    lod train lenet-mnist --set method=dense --out runs/dense
    python benchmarks/sizes.py runs/ordered runs/dense

Both models are cut by the same search (the paper's Figure 5a), nothing is trained again. Accuracy
is that of the test set. Also writes a picture, results/sizes.svg.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from interleaved import RESULTS, write

from maestro_lod.deploy.points import Frontier
from maestro_lod.layers.ranks import at_ranks
from maestro_lod.tasks.deployment import Trained, find_frontier
from maestro_lod.tasks.run import Run
from maestro_lod.train.evaluate import evaluate


def tested(trained: Trained, method: str) -> Frontier:
    """Search the sizes of a run, and give its best ones the accuracy of the test set."""
    found = find_frontier(trained, method=method).best
    points = []
    for point in found:
        with at_ranks(trained.model, point.ranks):
            accuracy = evaluate(trained.model, trained.data.test)["accuracy"]
        points.append(replace(point, accuracy=accuracy))
    return replace(found, points=tuple(points), method=method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ordered", type=Path, help="a run without penalty")
    parser.add_argument("dense", type=Path, help="a dense run")
    parser.add_argument("--method", default="look-ahead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = {
        "ordered ranks": tested(Trained.of(Run.open(options.ordered)), options.method),
        "SVD of dense": tested(Trained.of(Run.open(options.dense)), options.method),
    }
    print(f"{'test accuracy at':24}" + "".join(f"{name:>16}" for name in curves))
    answer: dict[str, object] = {"method": options.method}
    for kind in ("macs", "params"):
        for share in (0.75, 0.5, 1 / 3, 0.25, 0.15, 0.1):
            row = {}
            for name, curve in curves.items():
                limit = share * getattr(curve.dense, kind)
                fitting = [p.accuracy for p in curve if getattr(p, kind) <= limit]
                row[name] = max(fitting, default=None)
            shown = "".join(f"{'–' if a is None else f'{a:.2%}':>16}" for a in row.values())
            print(f"{kind} ≤ {share:.2f}× dense".ljust(24) + shown)
            answer[f"{kind} {share:.2f}"] = row
    answer["full"] = {name: curve[0].accuracy for name, curve in curves.items()}
    answer["points"] = {
        name: [[p.macs, p.params, p.accuracy] for p in curve] for name, curve in curves.items()
    }
    first, second = curves.values()
    replace(first, method="ordered ranks").plot(
        RESULTS / "sizes.svg", beside={"SVD of dense": second}
    )
    write("sizes", answer)


if __name__ == "__main__":
    main()
