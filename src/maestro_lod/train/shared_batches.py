"""A batch shared out: each process trains on its part, and together they train on all of it."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from maestro_lod.distributed.collectives import Group, sum_over
from maestro_lod.errors import TrainingError
from maestro_lod.model.inputs import Batch
from maestro_lod.train.evaluate import IGNORED, Score


def share_of(inputs: Any, target: Any, *, summed: bool) -> tuple[Batch, float]:
    """Return this process's part of a batch, and what its loss is to be multiplied with.

    DDP takes the mean of the gradients of all processes. So that it is the gradient of the whole
    batch, the loss of a part counts as much as it has targets; one that is a sum over the batch
    counts as often as there are processes. A process for which nothing is left runs on one sample
    that does not count, because the others wait for it.
    """
    world, process = dist.get_world_size(), dist.get_rank()
    size = _samples(inputs, target)
    begin, end = size * process // world, size * (process + 1) // world
    mine = slice(begin, end) if end > begin else slice(0, 1)

    def part(value: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t[mine] if t.ndim and len(t) == size else t, value)

    own = part(inputs), part(target)
    if end == begin or _counted(own[1]) == 0:
        return own, 0.0
    return own, world if summed else world * _counted(own[1]) / _counted(target)


def _samples(inputs: Any, target: Any) -> int:
    """Return how many samples a batch has: what its first tensors count."""
    sizes = [len(t) for t in tree_leaves((target, inputs)) if isinstance(t, Tensor) and t.ndim]
    if not sizes:
        raise TrainingError(
            "a batch without tensors cannot be shared out to several processes: train in one."
        )
    return sizes[0]


def _counted(target: Any) -> int:
    """Count the targets that the mean of a loss is taken over."""
    first = next((t for t in tree_leaves(target) if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        return 1
    return int((first != IGNORED).sum()) if first.dtype == torch.int64 else len(first)


def whole_score(part: Score, group: Group = None) -> Score:
    """Return what all processes have scored together."""
    values = torch.tensor(astuple(part), dtype=torch.float64)
    kinds = [type(getattr(part, field.name)) for field in fields(part)]
    total = sum_over(values, group).tolist()
    return Score(*(kind(value) for kind, value in zip(kinds, total, strict=True)))
