"""Fit INTERMEDIATE_COST: when is composing the factors faster than applying them in turn?

    python benchmarks/switch.py [--rounds 7] [--groups]

Times forward and backward of many layers both ways and asks, for each candidate of the constant,
how much slower its choices are than always choosing the faster way. Convolutions with groups have a
constant of their own, which --groups fits.
"""

from __future__ import annotations

import argparse
import math

import torch
from interleaved import Times, seconds, write
from torch import Tensor, nn

import maestro_lod.layers.lowrank as lowrank
from maestro_lod.layers import LowRank
from maestro_lod.layers.registry import low_rank_type

SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
CANDIDATES = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def cases() -> list[tuple[nn.Module, Tensor]]:
    """Layers of LeNet, ResNet-18 and transformers, with inputs of a usual batch."""
    return [
        (nn.Conv2d(1, 6, 5), torch.randn(128, 1, 28, 28)),
        (nn.Conv2d(6, 16, 5), torch.randn(128, 6, 12, 12)),
        (nn.Linear(256, 120), torch.randn(128, 256)),
        (nn.Linear(120, 84), torch.randn(128, 120)),
        (nn.Linear(84, 10), torch.randn(128, 84)),
        (nn.Conv2d(3, 64, 3, padding=1), torch.randn(32, 3, 32, 32)),
        (nn.Conv2d(64, 64, 3, padding=1), torch.randn(32, 64, 32, 32)),
        (nn.Conv2d(64, 128, 1, 2), torch.randn(32, 64, 32, 32)),
        (nn.Conv2d(128, 128, 3, padding=1), torch.randn(32, 128, 16, 16)),
        (nn.Conv2d(256, 256, 3, padding=1), torch.randn(32, 256, 8, 8)),
        (nn.Conv2d(512, 512, 3, padding=1), torch.randn(32, 512, 4, 4)),
        (nn.Conv2d(16, 16, 3, padding=1), torch.randn(32, 16, 32, 32)),
        (nn.Linear(512, 10), torch.randn(32, 512)),
        (nn.Linear(128, 128), torch.randn(32, 32, 128)),
        (nn.Linear(512, 2048), torch.randn(8, 64, 512)),
        (nn.Linear(2048, 512), torch.randn(8, 64, 2048)),
        (nn.Linear(256, 256), torch.randn(4096, 256)),
        (nn.Conv1d(64, 128, 5), torch.randn(32, 64, 100)),
        (nn.ConvTranspose2d(64, 32, 4, 2, 1), torch.randn(16, 64, 16, 16)),
    ]


def grouped_cases() -> list[tuple[nn.Module, Tensor]]:
    """Convolutions of few and of many groups, with 8 to 64 channels in each."""
    return [
        (nn.Conv2d(128, 128, 3, padding=1, groups=2), torch.randn(16, 128, 16, 16)),
        (nn.Conv2d(128, 128, 3, padding=1, groups=4), torch.randn(16, 128, 16, 16)),
        (nn.Conv2d(128, 128, 3, padding=1, groups=8), torch.randn(16, 128, 16, 16)),
        (nn.Conv2d(192, 192, 3, padding=1, groups=4), torch.randn(8, 192, 16, 16)),
        (nn.Conv2d(256, 256, 3, padding=1, groups=32), torch.randn(8, 256, 14, 14)),
        (nn.Conv2d(96, 96, 3, padding=1, groups=4), torch.randn(16, 96, 16, 16)),
        (nn.Conv2d(128, 128, 1, groups=4), torch.randn(16, 128, 16, 16)),
        (nn.ConvTranspose2d(128, 128, 4, 2, 1, groups=4), torch.randn(16, 128, 8, 8)),
        (nn.ConvTranspose2d(128, 128, 4, 2, 1, groups=8), torch.randn(16, 128, 8, 8)),
    ]


def both_ways(layer: LowRank, x: Tensor, rounds: int) -> Times:
    def run(composed: bool) -> None:
        lowrank.compose_is_cheaper = lambda *_: composed
        layer(x).sum().backward()

    once = seconds({"factored": lambda: run(False)}, rounds=1).median("factored")
    repeats = max(1, math.ceil(0.01 / once))
    return seconds(
        {"factored": lambda: run(False), "composed": lambda: run(True)},
        rounds=rounds,
        repeats=repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", action="store_true", help="fit convolutions with groups")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    choose, measured = lowrank.compose_is_cheaper, []
    for dense, x in grouped_cases() if options.groups else cases():
        x.requires_grad_()
        full = low_rank_type(type(dense)).from_dense(dense).full_rank
        for rank in sorted({max(1, round(share * full)) for share in SHARES}):
            layer = low_rank_type(type(dense)).from_dense(dense, rank)
            times = both_ways(layer, x, options.rounds)
            measured.append((layer, rank, times.ratio("composed", "factored")))
            ratio = times.ratio("composed", "factored")
            print(f"{dense!s:75.75s} rank {rank:4d}  composed/factored {ratio:6.3f}", flush=True)
    regret = {}
    for candidate in CANDIDATES:
        logs = []
        for layer, rank, ratio in measured:
            assert layer.positions is not None
            computed = layer.padded_rank(rank)
            pays = choose(layer.positions, *layer.matrix_shape, computed, candidate)
            logs.append(math.log((ratio if pays else 1.0) / min(ratio, 1.0)))
        regret[candidate] = math.exp(sum(logs) / len(logs))
        print(f"moving one value = {candidate:4d}: {regret[candidate]:.4f} × the best choice")
    write(
        "switch_groups" if options.groups else "switch",
        {"mean_slowdown_by_moving_one_value": regret},
    )


if __name__ == "__main__":
    main()
