"""Schedules: the share of its initial learning rate that a step has."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from maestro_lod.errors import OptionError, require_at_least_one, require_whole
from maestro_lod.train.method import Schedule

_PER_STEP = (OneCycleLR, CyclicLR)  # as torch's documentation has it; all others step per epoch


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


def cosine(steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Grow linearly for `warmup` steps, then fall to `end` along half a cosine, `steps` in all."""
    way = _after_warmup(steps, warmup, end)
    return lambda step: way(step, lambda x: (1 + math.cos(math.pi * x)) / 2)


def linear(steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Grow linearly for `warmup` steps, then fall to `end` along a line, `steps` in all."""
    way = _after_warmup(steps, warmup, end)
    return lambda step: way(step, lambda x: 1 - x)


_Way = Callable[[int, Callable[[float], float]], float]


def _after_warmup(steps: int, warmup: int, end: float) -> _Way:
    require_at_least_one("steps", steps, "all optimizer steps of the training")
    if require_whole("warmup", warmup) >= steps:
        raise OptionError(f"warmup={warmup} must be below all of the training's {steps} steps.")
    if not 0.0 <= end <= 1.0:
        raise OptionError(f"end={end!r} must be a share of the learning rate between 0 and 1.")

    def share(step: int, falling: Callable[[float], float]) -> float:
        if step < warmup:
            return (step + 1) / warmup
        passed = min((step - warmup) / max(steps - warmup - 1, 1), 1.0)
        return end + (1 - end) * falling(passed)

    return share


def from_scheduler(
    scheduler: LRScheduler, optimizer: Optimizer, epochs: int, steps_per_epoch: int | None
) -> Schedule:
    """Read off what one of torch's schedulers will do, on a copy of it; it is not stepped itself.

    Like in torch's documentation it steps once per epoch, OneCycleLR and CyclicLR once per step.
    """
    _require_readable(scheduler, optimizer)
    per_step = isinstance(scheduler, _PER_STEP)
    if steps_per_epoch is None:
        raise OptionError(
            f"{type(scheduler).__name__} needs training data with a length: len() must give its "
            "batches. Or give schedule= a function of the step."
        )
    shares = _shares(scheduler, optimizer, epochs * steps_per_epoch if per_step else epochs)
    length = 1 if per_step else steps_per_epoch
    return lambda step: shares[min(step // length, len(shares) - 1)]


def _require_readable(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise OptionError(f"schedule={name} was made for another optimizer than fit was given.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptionError(
            "schedule=ReduceLROnPlateau depends on what will be measured. Step it yourself in "
            "watch=Watch(epoch=…), or give a scheduler that is known beforehand."
        )
    if getattr(scheduler, "cycle_momentum", False):
        raise OptionError(
            f"schedule={name} would change the momentum too, which fit does not: make it with "
            "cycle_momentum=False."
        )


def _shares(scheduler: LRScheduler, optimizer: Optimizer, count: int) -> Sequence[float]:
    """Step a copy, with an optimizer of nothing, and note each share of the initial rates."""
    groups = [{"params": [torch.zeros(1, device="cpu")]} for _ in optimizer.param_groups]
    nothing = SGD(groups, lr=0.0)
    for group, known in zip(nothing.param_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in known.items() if key != "params"})
    twin = copy.deepcopy(scheduler, {id(optimizer): nothing})
    shares = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer of nothing does not step
        for _ in range(count):
            of_groups = {
                float(group["lr"]) / float(group["initial_lr"]) if group["initial_lr"] else 0.0
                for group in nothing.param_groups
            }
            if max(of_groups) - min(of_groups) > 1e-9:
                raise OptionError(
                    f"schedule={type(scheduler).__name__} treats parameter groups differently: "
                    "fit has one schedule for all of them."
                )
            shares.append(max(of_groups))
            twin.step()
    return shares
