"""Measure variants side by side: interleaved rounds in one process, medians, JSON with machine."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maestro_lod.cli.memory import keep_freed_memory

RESULTS = Path(__file__).parent / "results"

keep_freed_memory()  # how often fresh pages are needed differs from process to process


class Times(dict[str, list[float]]):
    """Seconds of each variant, round by round."""

    def median(self, name: str) -> float:
        return statistics.median(self[name])

    def ratio(self, name: str, over: str) -> float:
        """Return the median over the rounds of one variant's time relative to another's.

        Both were measured within the same moments, so what slows the machine down cancels out.
        """
        return self.quartiles(name, over)[1]

    def quartiles(self, name: str, over: str) -> list[float]:
        """Return the quartiles of that ratio: the middle one, and how far the middle half goes."""
        pairs = zip(self[name], self[over], strict=True)
        ratios = [one / other for one, other in pairs]
        return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def seconds(
    variants: dict[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Time each variant; every round runs all of them, in turning order.

    With `clock=time.process_time` that is CPU time, of all threads, which other work changes less.
    """
    for run in variants.values():
        run()
        run()
    times = Times({name: [] for name in variants})
    names = list(variants)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = clock()
            for _ in range(repeats):
                variants[name]()
            times[name].append((clock() - start) / repeats)
        if sys.stderr.isatty():
            print(f"\r{i + 1}/{rounds} rounds", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    return times


def write(question: str, answer: dict[str, Any]) -> None:
    """Keep an answer as JSON, with the commit and the machine it was measured on."""
    path = keep(question, answer)
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def keep(question: str, answer: dict[str, Any]) -> Path:
    """Write an answer like `write`, without a word."""
    record = {
        "question": question,
        "answer": answer,
        "commit": commit(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{question}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def commit() -> str:
    """Return the commit, marked if any code is not as it is there; results may differ."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command],
            cwd=RESULTS.parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":/*.py", ":/pyproject.toml", ":/constraints.txt")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
