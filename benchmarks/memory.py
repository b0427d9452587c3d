"""Measure the peak memory of a training step relative to the dense model.

    python benchmarks/memory.py [--only "small VGG" …]

Bytes of tensors, as torch's allocator counts them: parameters and optimizer state, and the most
that a step has at once in addition to them: gradients, activations and products of factors. No
noise; what kernels allocate past torch is not in it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from interleaved import write
from step import CASES, Case, lod_step, plain_step
from torch import nn
from torch.profiler import ProfilerActivity, profile


def most_at_once(step: Callable[[], None]) -> int:
    """Return the most bytes that are allocated at once while a step runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    results: Any = watched.profiler
    changes = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


def peak(case: Case, model: nn.Module, step: Callable[[], None]) -> int:
    step()  # makes the optimizer's state
    moments = 2 if case.adam else 1
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return (1 + moments) * held + most_at_once(step)


def peaks(case: Case) -> dict[str, float]:
    dense, full, small = case.model(low_rank=False), case.model(), case.model(case.small)
    of_dense = peak(case, dense, plain_step(case, dense))
    return {
        "dense_mib": of_dense / 2**20,
        "full rank": peak(case, full, lod_step(case, full)) / of_dense,
        "small ranks": peak(case, small, lod_step(case, small)) / of_dense,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    answer = {}
    for name in options.only:
        answer[name] = peaks(CASES[name])
        print(name, answer[name], flush=True)
    write("memory", answer)


if __name__ == "__main__":
    main()
