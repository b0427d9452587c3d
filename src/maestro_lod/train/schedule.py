"""Schedules: the share of its initial learning rate that a step has."""

from __future__ import annotations

from maestro_lod.errors import require_at_least_one
from maestro_lod.train.method import Schedule


def milestones(epochs: list[int], steps_per_epoch: int, factor: float = 0.1) -> Schedule:
    """Multiply the learning rate by `factor` at the start of each of these epochs."""
    require_at_least_one("steps_per_epoch", steps_per_epoch, "the optimizer steps of an epoch")
    return lambda step: factor ** sum(step >= epoch * steps_per_epoch for epoch in epochs)


def vaswani(warmup: int) -> Schedule:
    """Grow linearly for `warmup` steps, then fall with 1/√step; 1 at the end of the warm-up.

    The paper's 2·d^-½·min(s^-½, s·w^-3/2) is a learning rate of 2·(d·w)^-½ under this schedule.
    """
    require_at_least_one("warmup", warmup, "the steps of the warm-up")
    return lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
