"""Collective operations with readable errors: gather, broadcast, compare and sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from maestro_lod.errors import TrainingError

Group = Any
"""A process group of torch; None is the default group."""
T = TypeVar("T")

_GONE = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "NCCL")


@contextmanager
def peer_failure_context() -> Iterator[None]:
    """Raise TrainingError in place of torch's error if another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TrainingError) or not _is_peer_failure(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(
            f"another process of this training has ended or does not answer ({reason}). Read its "
            "message, and restart all processes from the last checkpoint; torchrun --max-restarts "
            "does that automatically."
        ) from error


def _is_peer_failure(error: RuntimeError) -> bool:
    kinds = tuple(
        getattr(dist, name)
        for name in ("DistBackendError", "DistNetworkError", "DistStoreError")
        if hasattr(dist, name)
    )
    return isinstance(error, kinds) or any(sign in str(error) for sign in _GONE)


def gather_objects(value: T, group: Group) -> list[T]:
    """Gather `value` from every process, ordered by process rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with peer_failure_context():
        dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(process: int, value: T, group: Group) -> T:
    """Return the `value` of one process of a group to all of them."""
    box: list[Any] = [value]
    source = dist.get_process_group_ranks(group)[process]
    with peer_failure_context():
        dist.broadcast_object_list(box, src=source, group=group)
    sent: T = box[0]
    return sent


def require_agreement(facts: Mapping[str, object], group: Group) -> None:
    """Raise TrainingError, in every process, if a fact differs between them."""
    everyone = gather_objects(dict(facts), group)
    for name, first in everyone[0].items():
        for process, other in enumerate(everyone):
            if other.get(name) != first:
                raise TrainingError(
                    f"the processes do not agree on {name}: process 0 has {first}, process "
                    f"{process} has {other.get(name)}, so that their models would differ. Give "
                    "LoD the same model, options and seed in every process."
                )


def sum_over(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the tensors of all processes of a group."""
    moved = values.to("cuda") if dist.get_backend(group) == "nccl" else values
    with peer_failure_context():
        dist.all_reduce(moved, group=group)
    return moved.to(values.device)
