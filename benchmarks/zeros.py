"""Train layers that start at zero, or without some ranks, and compare them with dense ones.

python benchmarks/zeros.py [--seeds 4] [--begin "half of the ranks"] [--data DIRECTORY]

A head of a ViT, a residual branch and the last layer of an MLP, on 3,000 images of MNIST: with Adam
and SGD, with and without a warm-up, from zeros, from half of the ranks and as torch begins. Each is
trained dense and by `LoD` (λ 1e-4), from the same weights on the same batches, and judged on the
test images. Results of other settings, or of the same commit, are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, commit, keep
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import LoD, decompose
from maestro_lod.cli.data import load_data
from maestro_lod.train.fit import fit

IMAGES, TEST, BATCH, EPOCHS = 3000, 10_000, 64, 12
STEPS = math.ceil(IMAGES / BATCH)
FIRST_SEED = 100
Samples = tuple[Tensor, Tensor]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.last(F.relu(self.first(x)))
        return y


class ViT(nn.Module):
    """One block on 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(49, 32), nn.Parameter(torch.randn(16, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        y: Tensor = self.head(self.block(self.embed(patches) + self.place).mean(1))
        return y


def perceptron(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), *inner, nn.ReLU(), nn.Linear(64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "head of a ViT": (ViT, "head"),
    "residual branch": (lambda: perceptron(Residual()), "2.last"),
    "last layer of an MLP": (perceptron, "3"),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "Adam": lambda model: optim.Adam(model.parameters(), lr=3e-3),
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}
WARM_UPS = {"two epochs": 2, "none": 0}
PARTS = ("begin", "layer", "warm-up", "optimizer")
BEGINS = ("zeros", "half of the ranks", "as torch does")


def begun(name: str, begin: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    build, layer = MODELS[name]
    model = build()
    weight = model.get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        if begin == "zeros":
            weight.zero_()
        elif begin == "half of the ranks":
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            s[len(s) // 2 :] = 0
            weight.copy_(u * s @ v)
    return model


class Shuffled:
    """Batches in an order that a seed decides."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples, self._generator = samples, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Samples]:
        x, y = self._samples
        for rows in torch.randperm(len(y), generator=self._generator).split(BATCH):
            yield x[rows], y[rows]


def accuracy(
    train: Samples, test: Samples, name: str, optimizer: str, warm_up: str, begin: str,
    seed: int, *, dense: bool,
) -> float:  # fmt: skip
    model, rising = begun(name, begin, seed), WARM_UPS[warm_up] * STEPS

    def schedule(step: int) -> float:
        whole = 0.5 * (1 + math.cos(math.pi * step / (STEPS * EPOCHS)))
        return whole * (min(1.0, step / rising) if rising else 1.0)

    model = model if dense else decompose(model)
    how = OPTIMIZERS[optimizer](model)
    method = None if dense else LoD(model, how, penalty=1e-4, threshold=1e-3, seed=seed)
    data: Any = Shuffled(train, seed)
    fit(model, data, optimizer=how, method=method, epochs=EPOCHS, schedule=schedule)
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(part).argmax(1) for part in test[0].split(1000)])
    return 100 * float((answers == test[1]).float().mean())


def compared(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Return both means over seeds, how far dense ones differ, and the mean difference."""
    dense, lod = ([pair[i] for pair in pairs] for i in (0, 1))
    gaps = [mine - other for other, mine in pairs]
    return {
        "dense": round(statistics.mean(dense), 2), "lod": round(statistics.mean(lod), 2),
        "between seeds": round(statistics.stdev(dense), 2),
        "difference": round(statistics.mean(gaps), 2),
        "error": round(statistics.stdev(gaps) / math.sqrt(len(gaps)), 2),
    }  # fmt: skip


def samples(directory: Path | None) -> tuple[Samples, Samples]:
    torch.manual_seed(0)  # which images are the first is drawn
    data = load_data("mnist", batch=IMAGES, directory=directory, validation=0, limit=IMAGES)
    whole = load_data("mnist", batch=TEST, directory=directory, validation=0)
    return next(iter(data.train)), next(iter(whole.test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--begin", nargs="*", choices=BEGINS, default=BEGINS)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = samples(options.data)
    record, known = RESULTS / "zeros.json", dict[tuple[str, ...], dict[str, Any]]()
    if record.exists():
        rows = json.loads(record.read_text())["answer"]["rows"]
        known = {tuple(row[part] for part in PARTS): row for row in rows}
    for case in product(BEGINS, MODELS, WARM_UPS, OPTIMIZERS):
        begin, name, warm_up, optimizer = case
        if begin not in options.begin or known.get(case, {}).get("commit") == commit():
            continue
        seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
        cell = (train, test, name, optimizer, warm_up, begin)
        pairs = [(accuracy(*cell, s, dense=True), accuracy(*cell, s, dense=False)) for s in seeds]
        known[case] = {
            **dict(zip(PARTS, case, strict=True)), "commit": commit(), "seeds": options.seeds,
            **compared(pairs),
        }  # fmt: skip
        print(known[case], flush=True)
        keep("zeros", {"rows": [*known.values()]})


if __name__ == "__main__":
    main()
