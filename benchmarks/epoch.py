"""What does a whole epoch cost once ranks have settled? `fit` on MNIST, low-rank beside dense.

    python benchmarks/epoch.py [--ranks 4,7,8,6,6] [--rounds 7] [--threads 1]

Loading, sampling, penalty, metrics and the shrink at the end are all in it. The ranks are those at
which `lod train lenet-mnist` ends. Each round is an epoch. Needs MNIST (docs/data.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from interleaved import seconds, write

import maestro_lod as lod
from maestro_lod.cli.data import load_data
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.progress import Progress


def epochs(ranks: list[int] | None, penalty: float) -> Callable[[], None]:
    """Train one more epoch at each call, from where the last one ended."""
    data = load_data("mnist", batch=64, validation=0.0)
    model = LeNet()
    if ranks is not None:
        lod.decompose(
            model, ranks=dict(zip(("conv1", "conv2", "fc1", "fc2", "fc3"), ranks, strict=True))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    train = None
    if low_rank_layers(model):  # no rank is removed, so that all rounds measure the same
        train = lod.LoD(model, optimizer, penalty=penalty, threshold=0.0, example=data.example)
    progress = Progress()

    def one_more() -> None:
        lod.fit(
            model, data.train, optimizer=optimizer, method=train, epochs=progress.epoch + 1,
            progress=progress,
        )  # fmt: skip

    return one_more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="4,7,8,6,6")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ranks = [int(rank) for rank in options.ranks.split(",")]
    times = seconds(
        {"dense": epochs(None, 0.0), "lod settled": epochs(ranks, 128e-5)}, rounds=options.rounds
    )
    ratio = times.ratio("lod settled", "dense")
    bound = {"ratio": ratio, "bound": 1.1, "met": ratio <= 1.1}
    print(f"dense {times.median('dense'):.3f} s, settled {ratio:.3f}× (bound 1.1)")
    write("epoch", {"ranks": ranks, "settled_over_dense": ratio, "bounds": {"LeNet": bound}})


if __name__ == "__main__":
    main()
