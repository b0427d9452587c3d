"""What does a training step cost beside the dense model's? Ratios of medians, lower is better.

    python benchmarks/step.py [--rounds 9] [--threads 1] [--only lenet|resnet18]

A step is forward, backward, penalty, optimizer. `masked` is the naive way: factors of full size
whose removed ranks are multiplied by zero. LeNet's first convolution has one channel, and low-rank
layers compute its gradient faster than torch does: `dense, our gradient` is dense with that too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
from interleaved import Times, seconds, write
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.app.models import LeNet, resnet18
from maestro_lod.layers import LowRankConv, few_channels
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


def with_our_gradient(model: LeNet) -> LeNet:
    conv = model.conv1
    conv.forward = lambda x: few_channels.convolve(
        x, conv.weight, conv.bias, conv.stride, conv.padding
    )
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The fastest SGD that torch has, on all sides.

    It does its work but moves nothing: weights that are trained on one batch for thousands of steps
    end in denormal numbers, which are slow in themselves.
    """
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)


def plain_step(
    model: nn.Module, x: Tensor, y: Tensor, penalty: Callable[[nn.Module], Tensor] | None = None
) -> Callable[[], None]:
    optimizer = sgd(model)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        if penalty is not None:
            loss = loss + PENALTY * penalty(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def lod_step(
    model: nn.Module, x: Tensor, y: Tensor, ranks: Mapping[str, int] | None = None
) -> Callable[[], None]:
    model = lod.decompose(model)
    if ranks is not None:
        cut(model, ranks)
    optimizer = sgd(model)
    train = lod.LoD(model, optimizer, penalty=PENALTY)

    def step() -> None:
        with train.step():
            loss = F.cross_entropy(model(x), y) + train.penalty_loss()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def penalty_alone(model: nn.Module) -> Callable[[], None]:
    model = lod.decompose(model)

    def step() -> None:
        lod.group_lasso(model).backward()
        model.zero_grad()

    return step


def report(question: str, times: Times, bounds: dict[str, tuple[str, str, float]]) -> None:
    over_dense = {name: times.ratio(name, "dense") for name in times}
    checks = {}
    print(f"{question}: dense step {1e3 * times.median('dense'):.1f} ms")
    for name, ratio in over_dense.items():
        print(f"  {name:24s} {ratio:6.3f} × dense")
    for claim, (of, over, bound) in bounds.items():
        ratio = times.ratio(of, over)
        checks[claim] = {"ratio": ratio, "bound": bound, "met": ratio <= bound}
        print(f"  {'ok ' if ratio <= bound else 'NOT'} {claim}: {ratio:.3f} (at most {bound:.3g})")
    answer = {"dense_ms": 1e3 * times.median("dense"), "over_dense": over_dense, "bounds": checks}
    write(question, answer)


def measure_resnet18(rounds: int) -> None:
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    full = lod.survey(resnet18()).ranks
    small = {name: max(1, round(0.15 * rank)) for name, rank in full.items()}
    times = seconds(
        {
            "dense": plain_step(resnet18(), x, y),
            "lod full rank": lod_step(resnet18(), x, y),
            "lod 15 %": lod_step(resnet18(), x, y, small),
            "masked 15 %": plain_step(masked(resnet18(), small), x, y, masked_lasso),
            "penalty alone": penalty_alone(resnet18()),
        },
        rounds=rounds,
    )
    report(
        "step_resnet18_batch32",
        times,
        {
            "full rank over dense": ("lod full rank", "dense", 1.12),
            "15 % of the ranks over dense": ("lod 15 %", "dense", 0.36),
            "15 % of the ranks over masked": ("lod 15 %", "masked 15 %", 1 / 1.4),
            "penalty over the full-rank step": ("penalty alone", "lod full rank", 0.03),
        },
    )


def measure_lenet(rounds: int) -> None:
    x, y = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    settled = {"conv1": 4, "conv2": 7, "fc1": 9, "fc2": 7, "fc3": 6}
    times = seconds(
        {
            "dense": plain_step(LeNet(), x, y),
            "dense, our gradient": plain_step(with_our_gradient(LeNet()), x, y),
            "lod full rank": lod_step(LeNet(), x, y),
            "lod settled": lod_step(LeNet(), x, y, settled),
            "masked settled": plain_step(masked(LeNet(), settled), x, y, masked_lasso),
        },
        rounds=20 * rounds,
        repeats=5,
    )
    report(
        "step_lenet_batch128",
        times,
        {
            "full rank over dense": ("lod full rank", "dense", 1.10),
            "ranks 4, 7, 9, 7, 6 over dense": ("lod settled", "dense", 1.05),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("lenet", "resnet18"))
    # on a shared machine, threads that wait for each other drown what is to be measured
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.only != "resnet18":
        measure_lenet(options.rounds)
    if options.only != "lenet":
        measure_resnet18(options.rounds)


if __name__ == "__main__":
    main()
