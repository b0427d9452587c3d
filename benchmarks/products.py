"""From which size on is oneDNN faster than MKL, gradients included? Microseconds of CPU time.

    python benchmarks/products.py [--rounds 15] [--threads 1]

Products u·v as layers do them, each with the gradients of both factors: torch's own, and
`multiply`, made to take the other library whatever the size. Where it is not faster at all, as on
Intel's processors, it is never taken. Writes benchmarks/results/products.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from interleaved import seconds, write
from torch import Tensor

from maestro_lod.layers import products

SIZES = (
    (16, 16, 144), (32, 32, 288), (64, 64, 256), (64, 64, 576), (120, 120, 400), (128, 128, 1152),
    (256, 64, 512), (256, 256, 2304), (512, 512, 512), (512, 512, 4608), (1920, 512, 512),
)  # fmt: skip


def step(
    multiply: Callable[[Tensor, Tensor], Tensor], m: int, r: int, n: int
) -> Callable[[], None]:
    torch.manual_seed(0)
    u, v = torch.randn(m, r, requires_grad=True), torch.randn(r, n, requires_grad=True)
    grad = torch.randn(m, n)

    def run() -> None:
        multiply(u, v).backward(grad)
        u.grad = v.grad = None

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    taken = products._faster_here()
    fewest, products._FEWEST_MACS = products._FEWEST_MACS, 0
    products._faster_here = lambda: True  # type: ignore[assignment]
    rows = {}
    for m, r, n in SIZES:
        both = {"torch": step(torch.mm, m, r, n), "oneDNN": step(products.multiply, m, r, n)}
        times = seconds(both, rounds=options.rounds, repeats=5, clock=time.process_time)
        macs = m * r * n
        rows[f"{m}×{r} · {r}×{n}"] = {
            "macs": macs,
            "torch_us": 1e6 * times.median("torch"),
            "ratio": times.ratio("oneDNN", "torch"),
            "taken": taken and macs >= fewest,
        }
        print(f"{m}×{r} · {r}×{n}", rows[f"{m}×{r} · {r}×{n}"], flush=True)
    write("products", rows)


if __name__ == "__main__":
    main()
