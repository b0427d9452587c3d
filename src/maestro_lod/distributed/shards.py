"""Sharded factors: sums by rank, and cuts to fewer ranks.

A sharded factor is a DTensor that is cut along one dimension over a process group: by FSDP2's
default the dimension of the ranks for `v`, and another one for `u`. Importance and penalty need
sums over all other dimensions: each process sums its part, and one all-reduce of one number per
rank adds the parts. No factor is gathered.
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

from maestro_lod.distributed.collectives import Group, peer_failure_context, sum_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> bool:
    """Return True for a DTensor, of which each process can have a part."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there is no DTensor
    return module is not None and isinstance(value, module.DTensor)


def local_part(value: Tensor) -> Tensor:
    """Return this process's part of a DTensor; any other tensor is returned unchanged."""
    part: Tensor = value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]
    return part


def gathered(value: Tensor) -> Tensor:
    """Return the whole tensor; all processes of a sharded one have to call this."""
    with peer_failure_context():
        whole: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    return whole


@dataclass(frozen=True)
class Cut:
    """How a tensor is sharded: the dimension, the process group, and this process's place in it.

    As in torch, all parts have the length of the first, except that the last ones have the rest.
    """

    dim: int
    group: Group
    process: int
    world: int

    @classmethod
    def from_tensor(cls, value: DTensor) -> Cut | None:
        """Return how a tensor is sharded; None if every process has all of it."""
        for i, placement in enumerate(value.placements):
            if placement.is_shard():
                mesh = value.device_mesh
                group = mesh.get_group(i)
                return cls(placement.dim, group, mesh.get_local_rank(i), mesh.size(i))  # type: ignore[attr-defined]
        return None

    def positions(self, size: int, process: int | None = None) -> range:
        """Return the positions, of `size` in all, that a process has; by default this one."""
        length = -(-size // self.world)
        start = min(size, length * (self.process if process is None else process))
        return range(start, min(size, start + length))


def fill(value: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into another one, or into this process's part of it."""
    part = local_part(value.detach())
    cut = Cut.from_tensor(value) if is_sharded(value) else None  # type: ignore[arg-type]
    if cut is not None:
        rows = cut.positions(whole.shape[cut.dim])
        whole = whole.narrow(cut.dim, rows.start, len(rows))
    part.copy_(whole)


def like(part: Tensor, value: DTensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a DTensor that is sharded as `value` is, given this process's part."""
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
    """Return sums for every rank of factors u, v, u, v, …, with one all-reduce per group.

    `summed(part, dims)` sums this process's part over all dimensions but that of the ranks.
    """
    sums: list[Tensor] = []
    groups: dict[Group, list[int]] = {}
    for i, factor in enumerate(factors):
        dim, part = 1 - i % 2, local_part(factor.detach()).to(dtype)
        local_sum = summed(part, [d for d in range(factor.ndim) if d != dim])
        cut = Cut.from_tensor(factor) if is_sharded(factor) else None  # type: ignore[arg-type]
        if cut is not None:
            groups.setdefault(cut.group, []).append(i)
            if cut.dim == dim:
                rows = cut.positions(factor.shape[dim])
                local_sum = torch.nn.functional.pad(
                    local_sum, (rows.start, factor.shape[dim] - rows.stop)
                )
        sums.append(local_sum)
    for group, members in groups.items():
        flat = sum_over(torch.cat([sums[i] for i in members]), group)
        sizes = [len(sums[i]) for i in members]
        for i, whole in zip(members, torch.split(flat, sizes), strict=True):
            sums[i] = whole
    return sums


def scaled_by_rank(factor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Multiply every rank of a sharded factor by a number, without communication."""
    cut = Cut.from_tensor(factor)  # type: ignore[arg-type]
    if cut is not None and cut.dim == dim:
        rows = cut.positions(factor.shape[dim])
        scale = scale[rows.start : rows.stop]
    shape = [-1 if d == dim else 1 for d in range(factor.ndim)]
    part = local_part(factor.detach())
    return like((part * scale.view(shape)).to(part.dtype), factor)  # type: ignore[arg-type]


def zero_behind_(value: Tensor, dim: int, rank: int) -> None:
    """Set all ranks behind `rank` to zero, in place, in this process's part of a tensor."""
    start = rank
    if is_sharded(value):
        cut = Cut.from_tensor(value)  # type: ignore[arg-type]
        if cut is not None and cut.dim == dim:
            start = rank - cut.positions(value.shape[dim]).start
    part = local_part(value.detach())
    start = min(max(start, 0), part.shape[dim])
    part.narrow(dim, start, part.shape[dim] - start).zero_()


def exchanged(part: Tensor, dim: int, size: int, cut: Cut) -> Tensor:
    """Return this process's part by `cut` of a tensor that is sharded along `dim`.

    `part` is this process's part along `dim`, in which the whole tensor has `size` positions.
    """
    own_rows, processes = cut.positions(part.shape[cut.dim]), range(cut.world)
    rows_by_process = [cut.positions(part.shape[cut.dim], process) for process in processes]
    sent_parts = [
        part.narrow(cut.dim, places.start, len(places)).reshape(-1) for places in rows_by_process
    ]
    received_shapes = [[*part.shape] for _ in processes]
    for process, shape in enumerate(received_shapes):
        shape[dim], shape[cut.dim] = len(cut.positions(size, process)), len(own_rows)
    sent, counts = torch.cat(sent_parts), [math.prod(shape) for shape in received_shapes]
    received = sent.new_empty(sum(counts))
    in_bytes = [
        [sent.itemsize * count for count in each] for each in (counts, map(len, sent_parts))
    ]
    with peer_failure_context():  # as bytes: gloo does not support every dtype
        dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), in_bytes[0], in_bytes[1], cut.group
        )
    pieces = zip(torch.split(received, counts), received_shapes, strict=True)
    return torch.cat([piece.view(shape) for piece, shape in pieces], dim)


@torch.no_grad()
def first_ranks(value: DTensor, dim: int, rank: int) -> Tensor:
    """Return this process's part of the first ranks of a tensor, sharded as before.

    If it is sharded along its ranks, each rank is sent at most once, to its new process.
    """
    part, cut = local_part(value.detach()), Cut.from_tensor(value)
    if cut is None or cut.dim != dim:
        return part.narrow(dim, 0, rank).clone(memory_format=torch.contiguous_format)
    rows_before, rows_after = cut.positions(value.shape[dim]), cut.positions(rank)
    rows = part.movedim(dim, 0).contiguous()
    send_ranges = [
        _common(rows_before, cut.positions(rank, process)) for process in range(cut.world)
    ]
    receive_ranges = [
        _common(rows_after, cut.positions(value.shape[dim], process))
        for process in range(cut.world)
    ]
    sent = rows[: sum(map(len, send_ranges))]  # removed ranks come last
    received = rows.new_empty(len(rows_after), *rows.shape[1:])
    with peer_failure_context():
        dist.all_to_all_single(
            received,
            sent,
            list(map(len, receive_ranges)),
            list(map(len, send_ranges)),
            group=cut.group,
        )
    return received.movedim(0, dim).contiguous()


def narrowed(value: Tensor, dim: int, rank: int) -> Tensor:
    """Return a copy of the first ranks of a tensor, sharded as before."""
    if not is_sharded(value):
        return value.narrow(dim, 0, rank).clone()
    shape = [rank if d == dim else size for d, size in enumerate(value.shape)]
    return like(first_ranks(value, dim, rank), value, shape)  # type: ignore[arg-type]


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
