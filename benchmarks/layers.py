"""Measure forward and backward of each kind of layer at shares of its rank, next to its MACs.

    python benchmarks/layers.py [--rounds 9] [--threads 1]

Ratios to the dense layer: CPU time, and in brackets MACs of the factors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from interleaved import seconds, write
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.model.cost import summary

SHARES = (1.0, 0.5, 0.25, 0.125)


def attention() -> nn.Module:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(256, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    return SelfAttention()


def recurrent(kind: type[nn.RNNBase]) -> Callable[[], nn.Module]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(128, 256, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(x)[0]

    return Recurrent


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear": (lambda: nn.Linear(512, 512), lambda: torch.randn(512, 512)),
    "Conv1d": (lambda: nn.Conv1d(128, 128, 5), lambda: torch.randn(16, 128, 100)),
    "Conv2d": (lambda: nn.Conv2d(128, 128, 3, padding=1), lambda: torch.randn(16, 128, 16, 16)),
    "Conv2d, 4 groups": (
        lambda: nn.Conv2d(128, 128, 3, padding=1, groups=4),
        lambda: torch.randn(16, 128, 16, 16),
    ),
    "Conv2d, 32 groups": (
        lambda: nn.Conv2d(256, 256, 3, padding=1, groups=32),
        lambda: torch.randn(8, 256, 14, 14),
    ),
    "Conv3d": (lambda: nn.Conv3d(32, 32, 3), lambda: torch.randn(4, 32, 10, 10, 10)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(128, 64, 4, 2, 1),
        lambda: torch.randn(16, 128, 8, 8),
    ),
    "MultiheadAttention": (attention, lambda: torch.randn(8, 64, 256)),
    "LSTM": (recurrent(nn.LSTM), lambda: torch.randn(16, 40, 128)),
    "GRU": (recurrent(nn.GRU), lambda: torch.randn(16, 40, 128)),
    "Embedding": (lambda: nn.Embedding(8000, 256), lambda: torch.randint(8000, (16, 64))),
}


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model(x).sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    answer: dict[str, dict[str, dict[str, float | None]]] = {}
    print("time × dense (MACs × dense) at a share of the full rank")
    print(f"{'':20s}" + "".join(f"{share:>18}" for share in SHARES))
    for kind, (build, example) in KINDS.items():
        x = example()
        variants = {"dense": step(build(), x)}
        macs: dict[float, float | None] = {}
        for share in SHARES:
            model = lod.decompose(build(), ranks=None if share == 1.0 else share)
            cost = summary(model, x)
            macs[share] = cost.macs / cost.dense_macs if cost.dense_macs else None
            variants[str(share)] = step(model, x)
        times = seconds(variants, rounds=options.rounds, repeats=2, clock=time.process_time)
        answer[kind] = {
            str(share): {"time": times.ratio(str(share), "dense"), "macs": macs[share]}
            for share in SHARES
        }
        cells = (
            f"{times.ratio(str(share), 'dense'):9.2f} ({'-' if m is None else f'{m:.2f}':>5s}) "
            for share, m in macs.items()
        )
        print(f"{kind:20s}" + " ".join(cells), flush=True)
    write("layers", answer)


if __name__ == "__main__":
    main()
