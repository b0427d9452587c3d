"""Measure time and error of the decomposition of weights, relative to torch's SVD.

    python benchmarks/svd.py [--rounds 3] [--threads 1]

CPU seconds (of all threads, so that a busy machine counts less) and the relative error, of which
torch's is the best that a rank allows; of large matrices also the most memory. Needs Linux.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
from interleaved import write
from torch import Tensor

from maestro_lod.layers.svd import svd_factors

SHAPES = ((512, 512), (512, 2048), (1024, 4096), (2048, 512))
LARGE = ((2048, 8192), (4096, 14336))
TORCH_SCALARS = 2048 * 8192  # of the largest matrix for which torch's own is waited for
SHARES = (1.0, 1 / 8, 1 / 64)
QUANTITIES = ("cpu_seconds", "relative_error")
Factors = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def torch_factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    left, scale, right = torch.linalg.svd(matrices, full_matrices=False)
    root = scale[:, :rank].sqrt()
    return left[:, :, :rank] * root[:, None, :], root[:, :, None] * right[:, :rank]


VARIANTS: dict[str, Factors] = {"ours": svd_factors, "torch": torch_factors}


def memory(name: str) -> int:
    """Return a number of bytes that Linux keeps about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def peak_over_weight(name: str, m: int, n: int) -> float:
    """Return the most memory beyond the weight that full rank takes, in weights.

    To be called in a process of its own: memory that was freed before would not count.
    """
    torch.set_num_threads(1)
    weight = torch.randn(1, m, n) / n**0.5
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    VARIANTS[name](weight, min(m, n))
    return (memory("VmHWM") - before) / (weight.numel() * weight.element_size())


def observe(run: Factors, weight: Tensor, rank: int) -> tuple[float, float]:
    """Return CPU seconds and relative error of one decomposition."""
    start = time.process_time()
    left, right = run(weight, rank)
    seconds = time.process_time() - start
    return seconds, float((weight - left @ right).norm() / weight.norm())


def measure(names: list[str], weight: Tensor, rank: int, rounds: int) -> dict[str, float]:
    """Return medians; every round runs all variants, in turning order."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seen[name].append(observe(VARIANTS[name], weight, rank))
    return {
        f"{name}_{quantity}": float(f"{statistics.median(values):.3g}")
        for name, rows in seen.items()
        for quantity, values in zip(QUANTITIES, zip(*rows, strict=True), strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--large-rounds", type=int, default=1, help="for matrices of minutes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    svd_factors(torch.randn(1, 256, 256), 256)  # what the first call loads is not the matrix's
    answer = {}
    for m, n in (*SHAPES, *LARGE):
        weight = torch.randn(1, m, n) / n**0.5
        rounds = options.large_rounds if (m, n) in LARGE else options.rounds
        names = ["ours", "torch"] if m * n <= TORCH_SCALARS else ["ours"]
        for rank in (round(share * min(m, n)) for share in SHARES):
            row = measure(names, weight, rank, rounds)
            if (m, n) in LARGE and rank == min(m, n):
                for name in names:
                    with get_context("spawn").Pool(1) as fresh:
                        peak = fresh.apply(peak_over_weight, (name, m, n))
                    row[f"{name}_peak_over_weight"] = round(peak, 2)
            answer[f"{m}x{n} rank {rank}"] = row
            print(f"{m}×{n} rank {rank}: {row}", flush=True)
    write("svd", answer)


if __name__ == "__main__":
    main()
