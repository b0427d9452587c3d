"""Measure the time to load a batch relative to the time to train on it.

    python benchmarks/data.py [--rounds 3] [--threads N]

Loading gathers, augments and normalizes, in the same process as the training. Needs MNIST, CIFAR-10
and Multi30k (docs/data.md); what is not there is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from interleaved import seconds, write
from torch import nn
from torch.nn import functional as F

from maestro_lod.baselines.models import resnet18
from maestro_lod.cli.data import Data, load_data
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import DataError

BATCHES = 20  # loaded at a time: one alone is over too soon to be timed


def loading(data: Data) -> Callable[[], None]:
    """Load some batches, going on where the last call stopped."""
    batches = chain.from_iterable(repeat(data.train))

    def load() -> None:
        for _ in range(BATCHES):
            next(batches)

    return load


def training(data: Data, model: nn.Module) -> Callable[[], None]:
    """Train on one batch, always the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)
    x, y = next(iter(data.train))

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, batch: int, rounds: int, model: nn.Module | None) -> dict[str, Any]:
    data = load_data(name, batch=batch)
    variants = {"load": loading(data)}
    if model is not None:
        variants["train"] = training(data, model)
    times = seconds(variants, rounds=rounds)
    per_second = {"load": BATCHES * batch / times.median("load")}
    answer: dict[str, Any] = {"batch": batch, "samples_per_second": per_second, "note": data.note}
    if model is not None:
        per_second["train"] = batch / times.median("train")
        answer["load_over_train"] = times.ratio("load", "train") / BATCHES
    print(f"{name}, batch {batch}: {per_second['load']:,.0f} samples/s loaded", end="")
    if model is not None:
        print(f", {per_second['train']:,.0f} trained by {type(model).__name__}", end="")
        print(f": {1 / answer['load_over_train']:,.0f} × as fast", end="")
    print()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases: dict[str, tuple[int, int, nn.Module | None]] = {
        "cifar10": (128, options.rounds, resnet18()),
        "mnist": (64, 20 * options.rounds, LeNet()),
        "multi30k": (256, 3 * options.rounds, None),
    }
    answer: dict[str, Any] = {"data": {}, "bounds": {}}
    for name, (batch, rounds, model) in cases.items():
        try:
            answer["data"][name] = measure(name, batch, rounds, model)
        except DataError as error:
            print(f"{name} left out: {error}")
    if "cifar10" in answer["data"]:
        ratio, bound = answer["data"]["cifar10"]["load_over_train"], 1 / 5
        claim = "loading a batch of CIFAR-10 over training ResNet-18 on it"
        answer["bounds"][claim] = {"ratio": ratio, "bound": bound, "met": ratio <= bound}
        print(f"  {'ok ' if ratio <= bound else 'NOT'} {claim}: {ratio:.4f} (at most {bound:.3g})")
    write("data", answer)


if __name__ == "__main__":
    main()
