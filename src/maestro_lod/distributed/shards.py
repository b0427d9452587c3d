"""A factor of which each process holds a part: sums over its ranks, and fewer of them.

A sharded factor is a DTensor that is cut along one dimension over a group of processes. That is the
dimension of the ranks for `v`, as FSDP2 shards by default, and another one for `u`. What is asked
of ranks are sums over all other dimensions: each process sums what it holds, and one all-reduce of
a number per rank does the rest. No factor is gathered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from maestro_lod.distributed.collectives import Group, explaining_loss_of_others, sum_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> bool:
    """Say whether a tensor is held in parts by several processes."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # without it nobody can have one
    return module is not None and isinstance(value, module.DTensor)


def local_part(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds; of a plain one that is all of it."""
    part: Tensor = value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]
    return part


def gathered(value: Tensor) -> Tensor:
    """Return a tensor whole; of a sharded one all processes have to ask at once."""
    with explaining_loss_of_others():
        whole: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    return whole


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut: along one dimension, over the processes of a group, this one being one.

    As torch cuts: all parts are as long as the first, the last ones are what is left.
    """

    dim: int
    group: Group
    process: int
    world: int

    @classmethod
    def of(cls, value: DTensor) -> Cut | None:
        """Return how a tensor is cut, None if every process has all of it."""
        for i, placement in enumerate(value.placements):
            if placement.is_shard():
                mesh = value.device_mesh
                group = mesh.get_group(i)
                return cls(placement.dim, group, mesh.get_local_rank(i), mesh.size(i))  # type: ignore[attr-defined]
        return None

    def held(self, size: int, process: int | None = None) -> range:
        """Return which of so many places a process holds, this one if none is named."""
        length = -(-size // self.world)
        start = min(size, length * (self.process if process is None else process))
        return range(start, min(size, start + length))


def fill(value: Tensor, whole: Tensor) -> None:
    """Copy into a tensor, or into the part of it that this process holds."""
    part = local_part(value.detach())
    cut = Cut.of(value) if is_sharded(value) else None  # type: ignore[arg-type]
    if cut is not None:
        held = cut.held(whole.shape[cut.dim])
        whole = whole.narrow(cut.dim, held.start, len(held))
    part.copy_(whole)


def like(part: Tensor, value: DTensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return the tensor, cut as another one is, of which this process holds a part."""
    whole = torch.empty(shape or value.shape, device="meta")
    kind: Any = sys.modules["torch.distributed.tensor"]
    made: Tensor = kind.DTensor.from_local(
        part, value.device_mesh, value.placements, run_check=False,
        shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip
    return made


def sums_by_rank(
    factors: Sequence[Tensor], dtype: torch.dtype, summed: Callable[[Tensor, list[int]], Tensor]
) -> list[Tensor]:
    """Return sums for every rank of factors u, v, u, v, …; one all-reduce for all of a group.

    `summed(part, dims)` sums what is held over all dimensions but that of the ranks.
    """
    sums: list[Tensor] = []
    groups: dict[Group, list[int]] = {}
    for i, factor in enumerate(factors):
        dim, part = 1 - i % 2, local_part(factor.detach()).to(dtype)
        mine = summed(part, [d for d in range(factor.ndim) if d != dim])
        cut = Cut.of(factor) if is_sharded(factor) else None  # type: ignore[arg-type]
        if cut is not None:
            groups.setdefault(cut.group, []).append(i)
            if cut.dim == dim:
                held = cut.held(factor.shape[dim])
                mine = torch.nn.functional.pad(mine, (held.start, factor.shape[dim] - held.stop))
        sums.append(mine)
    for group, members in groups.items():
        flat = sum_over(torch.cat([sums[i] for i in members]), group)
        sizes = [len(sums[i]) for i in members]
        for i, whole in zip(members, torch.split(flat, sizes), strict=True):
            sums[i] = whole
    return sums


def scaled_by_rank(factor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Multiply every rank of a sharded factor, where it is held."""
    cut = Cut.of(factor)  # type: ignore[arg-type]
    if cut is not None and cut.dim == dim:
        held = cut.held(factor.shape[dim])
        scale = scale[held.start : held.stop]
    shape = [-1 if d == dim else 1 for d in range(factor.ndim)]
    part = local_part(factor.detach())
    return like((part * scale.view(shape)).to(part.dtype), factor)  # type: ignore[arg-type]


def zero_behind_(value: Tensor, dim: int, rank: int) -> None:
    """Set all ranks behind one to zero, in place, in whatever part of a tensor is held."""
    start = rank
    if is_sharded(value):
        cut = Cut.of(value)  # type: ignore[arg-type]
        if cut is not None and cut.dim == dim:
            start = rank - cut.held(value.shape[dim]).start
    part = local_part(value.detach())
    start = min(max(start, 0), part.shape[dim])
    part.narrow(dim, start, part.shape[dim] - start).zero_()


def exchanged(part: Tensor, dim: int, size: int, cut: Cut) -> Tensor:
    """Return what this process holds by a cut, of a tensor of which each gives a part of another.

    What is given is cut alike, but along `dim`, where the whole tensor has so many places.
    """
    mine, processes = cut.held(part.shape[cut.dim]), range(cut.world)
    theirs = [cut.held(part.shape[cut.dim], process) for process in processes]
    to = [part.narrow(cut.dim, places.start, len(places)).reshape(-1) for places in theirs]
    come = [[*part.shape] for _ in processes]
    for process, shape in enumerate(come):
        shape[dim], shape[cut.dim] = len(cut.held(size, process)), len(mine)
    sent, counts = torch.cat(to), [math.prod(shape) for shape in come]
    received = sent.new_empty(sum(counts))
    in_bytes = [[sent.itemsize * count for count in each] for each in (counts, map(len, to))]
    with explaining_loss_of_others():  # as bytes, because gloo does not know every type
        dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), in_bytes[0], in_bytes[1], cut.group
        )
    pieces = zip(torch.split(received, counts), come, strict=True)
    return torch.cat([piece.view(shape) for piece, shape in pieces], dim)


@torch.no_grad()
def first_ranks(value: DTensor, dim: int, rank: int) -> Tensor:
    """Return this process's part of the first ranks of a tensor, cut as the whole one was.

    If it is cut along its ranks they move to whom they belong then, each at most once.
    """
    part, cut = local_part(value.detach()), Cut.of(value)
    if cut is None or cut.dim != dim:
        return part.narrow(dim, 0, rank).clone(memory_format=torch.contiguous_format)
    had, gets = cut.held(value.shape[dim]), cut.held(rank)
    rows = part.movedim(dim, 0).contiguous()
    to = [_common(had, cut.held(rank, process)) for process in range(cut.world)]
    come = [_common(gets, cut.held(value.shape[dim], process)) for process in range(cut.world)]
    sent = rows[: sum(map(len, to))]  # what belongs to nobody any more comes last
    received = rows.new_empty(len(gets), *rows.shape[1:])
    with explaining_loss_of_others():
        dist.all_to_all_single(
            received, sent, list(map(len, come)), list(map(len, to)), group=cut.group
        )
    return received.movedim(0, dim).contiguous()


def narrowed(value: Tensor, dim: int, rank: int) -> Tensor:
    """Return a copy of the first ranks of a tensor, cut as it was."""
    if not is_sharded(value):
        return value.narrow(dim, 0, rank).clone()
    shape = [rank if d == dim else size for d, size in enumerate(value.shape)]
    return like(first_ranks(value, dim, rank), value, shape)  # type: ignore[arg-type]


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
