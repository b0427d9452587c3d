"""Where is a convolution's own gradient faster than torch's? Ratios of medians, lower is better.

    python benchmarks/few_channels.py [--rounds 15] [--threads 1]

Forward and backward of first layers over one or two channels; `used` is what a layer would choose.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from interleaved import seconds, write
from torch import Tensor, nn

from maestro_lod.layers.few_channels import convolve, gradient_is_slow


def cases() -> list[tuple[nn.Conv1d | nn.Conv2d, tuple[int, ...]]]:
    """First layers of networks for grey images and sound with the shape of a batch."""
    return [
        (nn.Conv2d(1, 6, 5), (128, 1, 28, 28)),  # LeNet
        (nn.Conv2d(1, 4, 5), (128, 1, 28, 28)),
        (nn.Conv2d(1, 6, 5), (16, 1, 28, 28)),
        (nn.Conv2d(1, 6, 5), (2, 1, 28, 28)),
        (nn.Conv2d(1, 32, 3, padding=1), (64, 1, 32, 32)),
        (nn.Conv2d(1, 32, 3, padding=1), (4, 1, 32, 32)),
        (nn.Conv2d(1, 6, 3, padding=1), (8, 1, 8, 8)),
        (nn.Conv2d(1, 64, 3, padding=1), (2, 1, 224, 224)),
        (nn.Conv2d(1, 64, 7, 2, 3), (4, 1, 128, 128)),
        (nn.Conv2d(2, 32, 3, padding=1), (64, 2, 32, 32)),
        (nn.Conv2d(1, 16, 13, padding=6), (32, 1, 40, 40)),
        (nn.Conv2d(1, 16, 14, padding=7), (32, 1, 40, 40)),
        (nn.Conv2d(1, 16, 1), (64, 1, 32, 32)),
        (nn.Conv1d(1, 16, 9, padding=4), (64, 1, 1000)),
        (nn.Conv1d(1, 64, 80, 4), (16, 1, 8000)),
    ]


def both_ways(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> dict[str, Callable[[], None]]:
    direction = torch.randn_like(conv(x))

    def ours() -> None:
        y = convolve(x, conv.weight, conv.bias, conv.stride, conv.padding)
        y.backward(direction)

    return {"torch": lambda: conv(x).backward(direction), "ours": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    answer = {}
    for conv, shape in cases():
        x = torch.randn(shape)
        variants = both_ways(conv, x)
        once = seconds(variants, rounds=1).median("torch")
        times = seconds(variants, rounds=options.rounds, repeats=math.ceil(0.01 / once))
        used = gradient_is_slow(x, conv.weight, conv.padding, conv.dilation)
        name, ratio = f"{conv} on {' × '.join(map(str, shape))}", times.ratio("ours", "torch")
        answer[name] = {"over_torch": ratio, "used": used}
        print(f"{name:90s} {ratio:5.2f} × torch's{', used' if used else ''}", flush=True)
    write("few_channels", answer)


if __name__ == "__main__":
    main()
