"""Schedules: the share of the initial learning rate at each step."""

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

_PER_STEP = (OneCycleLR, CyclicLR)  # as in torch's documentation; all others step per epoch


def milestones(epochs: list[int], steps_per_epoch: int, factor: float = 0.1) -> Schedule:
    """Return a schedule that multiplies the learning rate at the start of some epochs.

    >>> schedule = milestones([30, 60], steps_per_epoch=len(loader))

    Args:
        epochs: The epochs, counted from 0.
        steps_per_epoch: Optimizer steps of an epoch.
        factor: The factor at each of them.

    Returns:
        The schedule.

    Raises:
        OptionError: `steps_per_epoch` is not a positive number.
    """
    require_at_least_one("steps_per_epoch", steps_per_epoch, "the optimizer steps of an epoch")
    return lambda step: factor ** sum(step >= epoch * steps_per_epoch for epoch in epochs)


def vaswani(warmup: int) -> Schedule:
    """Return the Transformer's schedule: grow for `warmup` steps, then fall with 1/√step.

    It is 1 at the end of the warm-up. The paper's 2·d^-½·min(s^-½, s·w^-3/2) is this schedule with
    a learning rate of 2·(d·w)^-½.

    >>> schedule = vaswani(warmup=4000)

    Args:
        warmup: Steps of the warm-up.

    Returns:
        The schedule.

    Raises:
        OptionError: `warmup` is not a positive number.
    """
    require_at_least_one("warmup", warmup, "the steps of the warm-up")
    return lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def cosine(steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Return a schedule that grows linearly, then falls to `end` along half a cosine.

    >>> schedule = cosine(epochs * len(loader), warmup=100)

    Args:
        steps: All optimizer steps of the training.
        warmup: Steps of the linear growth.
        end: The share of the learning rate at the last step.

    Returns:
        The schedule.

    Raises:
        OptionError: `warmup` is not below `steps`, or `end` is not in [0, 1].
    """
    share_at = _after_warmup(steps, warmup, end)
    return lambda step: share_at(step, lambda x: (1 + math.cos(math.pi * x)) / 2)


def linear(steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Return a schedule that grows linearly, then falls to `end` along a line.

    >>> schedule = linear(epochs * len(loader), warmup=100)

    Args:
        steps: All optimizer steps of the training.
        warmup: Steps of the linear growth.
        end: The share of the learning rate at the last step.

    Returns:
        The schedule.

    Raises:
        OptionError: `warmup` is not below `steps`, or `end` is not in [0, 1].
    """
    share_at = _after_warmup(steps, warmup, end)
    return lambda step: share_at(step, lambda x: 1 - x)


_ShareAt = Callable[[int, Callable[[float], float]], float]


def _after_warmup(steps: int, warmup: int, end: float) -> _ShareAt:
    require_at_least_one("steps", steps, "all optimizer steps of the training")
    if require_whole("warmup", warmup) >= steps:
        raise OptionError(f"warmup={warmup} must be below the {steps} steps of the training.")
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
    """Return the schedule of a torch scheduler, by stepping a copy of it.

    As in torch's documentation it steps once per epoch; OneCycleLR and CyclicLR once per step.

    Args:
        scheduler: The scheduler, which is not stepped.
        optimizer: The optimizer of the training.
        epochs: The epochs of the training.
        steps_per_epoch: Optimizer steps of an epoch; None if the data has no length.

    Returns:
        The schedule.

    Raises:
        OptionError: The scheduler belongs to another optimizer, or its values are not known before
            the training.
    """
    _require_readable(scheduler, optimizer)
    per_step = isinstance(scheduler, _PER_STEP)
    if steps_per_epoch is None:
        raise OptionError(
            f"{type(scheduler).__name__} needs training data with a length. Give data whose len() "
            "is its number of batches, or give schedule= a function of the step."
        )
    shares = _shares(scheduler, optimizer, epochs * steps_per_epoch if per_step else epochs)
    length = 1 if per_step else steps_per_epoch
    return lambda step: shares[min(step // length, len(shares) - 1)]


def _require_readable(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise OptionError(
            f"schedule={name} was created for another optimizer than fit has. Give both the same."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptionError(
            "schedule=ReduceLROnPlateau depends on future measurements. Step it yourself in "
            "watch=Watch(epoch=…), or give a scheduler that does not."
        )
    if getattr(scheduler, "cycle_momentum", False):
        raise OptionError(
            f"schedule={name} changes the momentum too, which fit does not support. Create it with "
            "cycle_momentum=False."
        )


def _shares(scheduler: LRScheduler, optimizer: Optimizer, count: int) -> Sequence[float]:
    """Step a copy, with an optimizer of dummies, and return each share of the initial rate."""
    groups = [{"params": [torch.zeros(1, device="cpu")]} for _ in optimizer.param_groups]
    dummy = SGD(groups, lr=0.0)
    for group, original in zip(dummy.param_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in original.items() if key != "params"})
    twin = copy.deepcopy(scheduler, {id(optimizer): dummy})
    shares = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the dummy optimizer, which does not step
        for _ in range(count):
            shares_of_groups = {
                float(group["lr"]) / float(group["initial_lr"]) if group["initial_lr"] else 0.0
                for group in dummy.param_groups
            }
            if max(shares_of_groups) - min(shares_of_groups) > 1e-9:
                raise OptionError(
                    f"schedule={type(scheduler).__name__} treats parameter groups differently, but "
                    "fit has one schedule for all. Give one that treats them alike."
                )
            shares.append(max(shares_of_groups))
            twin.step()
    return shares
