"""Stable ranks of layers, and their convergence during training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

RELAXATION = {1: 5.0, 2: 2.5}
"""Factor on the tolerance of the last unstable layers, by their number."""


def stable_rank(matrices: Tensor) -> int:
    """Return ⌊Σσ² / max σ²⌋ of (groups, m, n) matrices, the mean over groups; at least 1."""
    values = torch.linalg.svdvals(matrices.detach().double()) ** 2
    ratios = values.sum(1) / values.amax(1).clamp_min(torch.finfo(torch.float64).tiny)
    return max(1, math.floor(float(ratios.mean()) + 1e-9))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the exponential moving average with weight 2 / (window + 1) on the newest."""
    newest = 2 / (window + 1)
    result = [float(values[0])]
    for value in values[1:]:
        result.append(newest * value + (1 - newest) * result[-1])
    return result


def slopes(values: Sequence[float]) -> list[float]:
    """Return central differences, one-sided at both ends."""
    if len(values) < 2:
        return [math.inf] * len(values)
    inner = [(after - before) / 2 for before, after in zip(values, values[2:], strict=False)]
    return [values[1] - values[0], *inner, values[-1] - values[-2]]


@dataclass
class StableRanks:
    """History of the stable ranks of layers; a layer that has converged once stays so."""

    window: int
    """Epochs of the moving average; no layer converges earlier."""
    last: int
    """Number of last slopes that are averaged."""
    epsilon: float
    """Largest mean slope of a layer that has converged."""
    trace: dict[str, list[int]] = field(default_factory=dict)
    stable: list[str] = field(default_factory=list)

    def add(self, ranks: Mapping[str, int]) -> bool:
        """Add the ranks of an epoch; return True if every layer has converged."""
        for name, rank in ranks.items():
            self.trace.setdefault(name, []).append(rank)
        moving = [name for name in self.trace if name not in self.stable]
        limit = self.epsilon * RELAXATION.get(len(moving), 1.0)
        self.stable += [name for name in moving if self._mean_slope(name) <= limit]
        return len(self.stable) == len(self.trace)

    def _mean_slope(self, name: str) -> float:
        values = self.trace[name]
        if len(values) < self.window:
            return math.inf
        found = [abs(slope) for slope in slopes(smoothed(values, self.window))][-self.last :]
        return sum(found) / len(found)
