"""The processes that train one model together: what each says, told to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from maestro_lod.errors import TrainingError

Group = Any
"""A process group of torch; None stands for no others."""
T = TypeVar("T")

_GONE = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "NCCL")


@contextmanager
def explaining_loss_of_others() -> Iterator[None]:
    """Say in one sentence that another process has ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TrainingError) or not _is_loss(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(
            f"another process of this training has ended or does not answer ({reason}). Its own "
            "message says why; start all of them again from the last checkpoint, as torchrun "
            "--max-restarts does by itself."
        ) from error


def _is_loss(error: RuntimeError) -> bool:
    kinds = tuple(
        getattr(dist, name)
        for name in ("DistBackendError", "DistNetworkError", "DistStoreError")
        if hasattr(dist, name)
    )
    return isinstance(error, kinds) or any(sign in str(error) for sign in _GONE)


def told_by_all(value: T, group: Group) -> list[T]:
    """Return what every process has said, in the order of the processes."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with explaining_loss_of_others():
        dist.all_gather_object(everyone, value, group=group)
    return everyone


def told_by(process: int, value: T, group: Group) -> T:
    """Return what one process of a group has said."""
    box: list[Any] = [value]
    source = dist.get_process_group_ranks(group)[process]
    with explaining_loss_of_others():
        dist.broadcast_object_list(box, src=source, group=group)
    said: T = box[0]
    return said


def require_agreement(facts: Mapping[str, object], group: Group) -> None:
    """Refuse to go on, in every process alike, where not all say the same."""
    everyone = told_by_all(dict(facts), group)
    for what, first in everyone[0].items():
        for process, theirs in enumerate(everyone):
            if theirs.get(what) != first:
                raise TrainingError(
                    f"the processes do not agree on {what}: process 0 has {first}, process "
                    f"{process} has {theirs.get(what)}. Their models would differ from here on: "
                    "give LoD the same model, options and seed in every process."
                )


def sum_over(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the tensors of all processes of a group."""
    moved = values.to("cuda") if dist.get_backend(group) == "nccl" else values
    with explaining_loss_of_others():
        dist.all_reduce(moved, group=group)
    return moved.to(values.device)
