"""Split each batch between the processes of a training."""

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


def local_share(inputs: Any, target: Any, *, summed: bool) -> tuple[Batch, float]:
    """Return this process's part of a batch, and the factor of its loss.

    DDP averages the gradients of all processes. To make that the gradient of the whole batch, the
    loss of a part is weighted by its number of targets, and a summed loss by the number of
    processes. A process without samples runs on one with weight zero, because the others wait.
    """
    world, process = dist.get_world_size(), dist.get_rank()
    size = _samples(inputs, target)
    begin, end = size * process // world, size * (process + 1) // world
    positions = slice(begin, end) if end > begin else slice(0, 1)

    def part(value: Any) -> Any:
        return tree_map_only(
            Tensor, lambda t: t[positions] if t.ndim and len(t) == size else t, value
        )

    local = part(inputs), part(target)
    if end == begin or _counted(local[1]) == 0:
        return local, 0.0
    return local, world if summed else world * _counted(local[1]) / _counted(target)


def _samples(inputs: Any, target: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor."""
    sizes = [len(t) for t in tree_leaves((target, inputs)) if isinstance(t, Tensor) and t.ndim]
    if not sizes:
        raise TrainingError(
            "a batch without tensors cannot be split between processes. Train in one process."
        )
    return sizes[0]


def _counted(target: Any) -> int:
    """Return the number of targets in the mean of a loss."""
    first = next((t for t in tree_leaves(target) if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        return 1
    return int((first != IGNORED).sum()) if first.dtype == torch.int64 else len(first)


def combined_score(part: Score, group: Group = None) -> Score:
    """Return the sum of the scores of all processes."""
    values = torch.tensor(astuple(part), dtype=torch.float64)
    kinds = [type(getattr(part, field.name)) for field in fields(part)]
    total = sum_over(values, group).tolist()
    return Score(*(kind(value) for kind, value in zip(kinds, total, strict=True)))
