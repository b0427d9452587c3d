"""Measure training steps relative to the dense model: ratios of CPU time, lower is better.

    python benchmarks/step.py [--rounds 15] [--threads 1] [--only "small VGG" …] [--compiled]

A step is forward, backward, penalty, optimizer; `4 batches` accumulates the gradients of four.
Until ranks are ordered, layers are trained as their dense weights: nothing is multiplied twice.
`limit` is what arithmetic alone would allow: each layer composed once per step or factored,
whichever multiplies less, at the speed of the dense layers. `masked` is the naive way: factors of
full size whose removed ranks are multiplied by zero. Each model is measured in turn, in one
process; results of models that are left out are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from interleaved import RESULTS, seconds, write
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.baselines.models import resnet18, resnet18_small, transformer_small, vgg19_small
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.layers import LowRankConv, composed_once
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.macs import dense_macs
from maestro_lod.train.shrink import cut

PENALTY = 64e-6


class MaskedConv(nn.Module):
    """A low-rank convolution that keeps all its ranks and multiplies the removed ones by zero."""

    def __init__(self, layer: LowRankConv, rank: int) -> None:
        super().__init__()
        self.u, self.v, self.bias = layer.u, layer.v, layer.bias
        self.stride, self.padding = layer.stride, layer.padding
        self.register_buffer("mask", (torch.arange(layer.rank) < rank).float().view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = F.conv2d(x, self.v, stride=self.stride, padding=self.padding) * self.mask
        return F.conv2d(z, self.u[:, :, None, None], self.bias)


class MaskedLinear(nn.Module):
    """The same for a linear layer."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.u, self.v, self.bias = layer.u, layer.v, layer.bias
        self.register_buffer("mask", (torch.arange(layer.rank) < rank).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.v) * self.mask, self.u, self.bias)


def masked_lasso(model: nn.Module) -> Tensor:
    """The penalty over all stored ranks, with plain autograd."""
    total = torch.zeros(())
    for layer in model.modules():
        if isinstance(layer, MaskedConv | MaskedLinear):
            for factor, dim in ((layer.u, 1), (layer.v, 0)):
                columns = factor.transpose(0, dim).flatten(1).square().sum(1) + 1e-30
                total = total + columns.flip(0).cumsum(0).sqrt().sum()
    return total


def masked(model: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    model = lod.decompose(model)
    for name, rank in ranks.items():
        layer = model.get_submodule(name)
        parent, _, key = name.rpartition(".")
        kind = MaskedConv if isinstance(layer, LowRankConv) else MaskedLinear
        setattr(model.get_submodule(parent), key, kind(layer, rank))
    return model


@dataclass(frozen=True)
class Case:
    """A model with a batch of its usual size."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    classes: int
    small: float | dict[str, int] = 0.15
    """Ranks at which training ends, or a share of them."""
    channels_last: bool = False
    adam: bool = False
    skip: tuple[str, ...] = ()

    def model(self, ranks: Any = None, *, low_rank: bool = True) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        if low_rank:
            model = lod.decompose(model, skip=list(self.skip) or None)
        if ranks is not None:
            full = lod.ranks(model)
            cut(model, ranks if isinstance(ranks, dict) else shares(full, ranks))
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def batch(self) -> tuple[tuple[Tensor, ...], Tensor]:
        torch.manual_seed(1)
        x = self.inputs()
        if self.channels_last:
            x = tuple(part.to(memory_format=torch.channels_last) for part in x)
        shape = x[0].shape if self.adam else x[0].shape[:1]  # a class per token, or per image
        return x, torch.randint(self.classes, shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the fastest optimizer of its kind that torch has, on all sides.

        It does its work but moves nothing: weights that are trained on one batch for thousands of
        steps end in denormal numbers, which are slow in themselves.
        """
        if self.adam:
            return torch.optim.Adam(model.parameters(), lr=0.0, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)


def shares(full: Mapping[str, int], share: float) -> dict[str, int]:
    return {name: max(1, round(share * rank)) for name, rank in full.items()}


def images(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


CASES = {
    "LeNet": Case(
        LeNet, images(64, 1, 28, 28), 10, {"conv1": 4, "conv2": 7, "fc1": 9, "fc2": 7, "fc3": 6}
    ),
    "small ResNet": Case(resnet18_small, images(128, 3, 32, 32), 10, channels_last=True),
    "small VGG": Case(vgg19_small, images(128, 3, 32, 32), 10, channels_last=True),
    "small Transformer": Case(
        transformer_small,
        lambda: (torch.randint(4, 9521, (128, 15)), torch.randint(4, 9521, (128, 15))),
        9521,
        adam=True,
        skip=("embedding",),
    ),
    "ResNet-18": Case(resnet18, images(32, 3, 32, 32), 10),
}
BOUNDS = {
    ("LeNet", "full rank"): 1.05,
    ("small ResNet", "full rank"): 1.10,
    ("small VGG", "full rank"): 1.10,
    ("small Transformer", "full rank"): 1.03,
    ("ResNet-18", "full rank"): 1.03,
    **{(name, "before a budget lands"): 1.03 for name in CASES},
    **{(name, "full rank, 4 batches"): 1.03 for name in CASES},
}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def plain_step(
    case: Case,
    model: nn.Module,
    *,
    batches: int = 1,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> Callable[[], None]:
    optimizer, (x, y) = case.optimizer(model), case.batch()

    def step() -> None:
        for _ in range(batches):
            loss = loss_of(model(*x), y)
            if penalty is not None:
                loss = loss + PENALTY * penalty(model)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def lod_step(
    case: Case,
    model: nn.Module,
    *,
    run: nn.Module | None = None,
    batches: int = 1,
    budget: float | None = None,
) -> Callable[[], None]:
    """Train as `fit` does; `run` is the compiled form of the model, if there is one."""
    optimizer, (x, y) = case.optimizer(model), case.batch()
    run = model if run is None else run
    train: lod.LoD | lod.Elastic
    if budget is None:
        train = lod.LoD(model, optimizer, penalty=PENALTY, example=x)
    else:
        train = lod.Elastic(model, optimizer, sizes=[budget], example=x)
        plan = lod.RunPlan(10**6, 1, batches=[(x, y)], loss=loss_of)
        train.start(model, optimizer, plan)

    def one() -> None:
        train.backward(lambda: run(*x), lambda output: loss_of(output, y))
        optimizer.step()
        optimizer.zero_grad()

    def several() -> None:
        with composed_once(model, batches):
            for _ in range(batches):
                with train.step():
                    loss_of(run(*x), y).backward()
        if isinstance(train, lod.LoD):
            train.add_penalty_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return one if batches == 1 else several


def limit(case: Case, batches: int) -> float:
    """Return the MACs of a step over those of the dense model, each layer in its cheaper way."""
    model = case.model()
    counted, more = dense_macs(model, case.batch()[0]), 0.0
    for name, layer in low_rank_layers(model).items():
        positions = batches * counted.positions[name]
        composed = layer.rank * layer.dense_weights
        more += min(composed, layer.macs(positions) - layer.dense_macs(positions))
    return 1 + more / (batches * counted.total)


def variants_of(case: Case, *, compiled: bool) -> dict[str, Callable[[], None]]:
    dense = case.model(low_rank=False)
    if compiled:
        full, small = case.model(), case.model(case.small)
        return {
            "dense": plain_step(case, dense),
            "dense, compiled": plain_step(case, torch.compile(case.model(low_rank=False))),
            "full rank, compiled": lod_step(case, full, run=torch.compile(full)),
            "small ranks, compiled": lod_step(case, small, run=torch.compile(small)),
        }
    found = {
        "dense": plain_step(case, dense),
        "full rank": lod_step(case, case.model()),
        "before a budget lands": lod_step(case, case.model(), budget=0.5),
        "small ranks": lod_step(case, case.model(case.small)),
        "dense, 4 batches": plain_step(case, case.model(low_rank=False), batches=4),
        "full rank, 4 batches": lod_step(case, case.model(), batches=4),
    }
    if not case.adam:  # masks are written for convolutions and linear layers
        full = case.model()
        ranks = case.small if isinstance(case.small, dict) else shares(lod.ranks(full), case.small)
        step = plain_step(case, masked(full, ranks), penalty=masked_lasso)
        found["small ranks, masked"] = step
    return found


def measured(name: str, case: Case, rounds: int, *, compiled: bool) -> dict[str, Any]:
    """Return each variant's time over that of the dense step of as many batches."""
    variants = variants_of(case, compiled=compiled)
    once = seconds({"dense": variants["dense"]}, rounds=1, clock=time.process_time)
    repeats = math.ceil(0.03 / once.median("dense"))
    times = seconds(variants, rounds=rounds, repeats=repeats, clock=time.process_time)
    answer: dict[str, Any] = {"dense_cpu_ms": 1e3 * times.median("dense")}
    for variant in list(variants)[1:]:
        if variant == "dense, 4 batches":
            continue
        over = "dense, 4 batches" if variant.endswith("4 batches") else "dense"
        low, middle, high = times.quartiles(variant, over)
        found: dict[str, Any] = {"ratio": middle, "middle half": [low, high]}
        if variant.startswith("full rank") and not compiled:
            found["limit"] = limit(case, 4 if over != "dense" else 1)
        if bound := BOUNDS.get((name, variant)) if not compiled else None:
            found |= {"bound": bound, "met": middle <= bound}
        answer[variant] = found
        print(f"{name:18s} {variant:24s} {middle:6.3f} ({low:.3f} to {high:.3f}) {found}")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="with torch.compile instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    question = "step_compiled" if options.compiled else "step"
    question += f"_{options.threads}_threads" if options.threads > 1 else ""
    path = RESULTS / f"{question}.json"
    answer = json.loads(path.read_text())["answer"] if path.exists() else {}
    for name in options.only:
        answer[name] = measured(name, CASES[name], options.rounds, compiled=options.compiled)
        write(question, answer)


if __name__ == "__main__":
    main()
