"""Tensor files of sharded models, read and written with at most one whole tensor per process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from maestro_lod.distributed.collectives import Group, broadcast_object, gather_objects
from maestro_lod.distributed.fsdp import adopt_shards, put_shard, reshard, shard_group
from maestro_lod.distributed.shards import Cut, exchanged, gathered, is_sharded, local_part
from maestro_lod.errors import CheckpointError, listed
from maestro_lod.layers.ranks import low_rank_layers


def write_by_the_first(
    tensors: Mapping[str, Tensor],
    order: Sequence[str],
    write: Callable[[], None],
    path: Path,
    group: Group,
) -> None:
    """Write tensors from the first process of a group; the others send their parts in turn.

    `write` reads each tensor once, in this order.
    """
    first = group.rank() == 0
    order, fault = broadcast_object(0, (order, _write_fault(path, tensors) if first else ""), group)
    if fault:
        raise CheckpointError(fault)
    if first:
        write()
    else:
        for key in order:
            if tensors[key].numel():
                gathered(tensors[key])
    broadcast_object(0, None, group)  # all processes wait for the file


def _write_fault(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Return why a file cannot be written, '' if it probably can.

    It is checked first, since after an error in one process the others would wait for tensors.
    """
    folder, needed = path.absolute().parent, sum(value.nbytes for value in tensors.values())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return (
            f"{path} cannot be written: {folder} is not a writable directory. Choose another one."
        )
    if (free := shutil.disk_usage(folder).free) < needed:
        return (
            f"{path} needs {needed / 1e6:.0f} MB, but the disk has {free / 1e6:.0f} MB free. Make "
            "room or choose another disk."
        )
    return ""


@torch.no_grad()
def fill_shards(
    model: nn.Module,
    ranks: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str, range | None], Tensor],
    path: Path,
) -> None:
    """Fill a sharded model, in place, with tensors of a file; each process reads a part of each.

    `shapes` has the shapes of all tensors at these ranks. `read` returns a tensor, or a range of it
    along its first dimension in the file: the ranks of factors, else the first dimension.
    """
    adopt_shards(model)
    reshard(model)
    layers = low_rank_layers(model)
    _require_same_shapes(model, layers, ranks, shapes, path)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, layer in layers.items():
        held |= dict(zip(_factors(name), layer.stored_factors(), strict=True))
    sharded = {key: t if is_sharded(t) else None for key, t in held.items() if key in shapes}
    cuts = {key: t if t is None else Cut.from_tensor(t) for key, t in sharded.items()}  # type: ignore[arg-type]
    rows = {key: _row_dim(key, layers) for key in cuts}
    local_rows = {
        key: None if cut is None else cut.positions(shapes[key][rows[key]])
        for key, cut in cuts.items()
    }
    parts = _read_by_all(lambda: {key: read(key, local_rows[key]) for key in cuts}, path, model)
    for key, cut in cuts.items():
        target, part = held[key], parts.pop(key)
        part = part.to(local_part(target).device, target.dtype)
        if cut is not None and cut.dim != rows[key]:
            part = exchanged(part, rows[key], shapes[key][rows[key]], cut)
        name, _, last = key.rpartition(".")
        if key in _factors(name) and name in layers and layers[name].sharded:
            put_shard(layers[name], last, part.contiguous(), ranks[name])
        else:
            local_part(target.detach()).copy_(part)


def _factors(layer: str) -> tuple[str, str]:
    """Return the names of the factors of a layer."""
    return f"{layer}.u".lstrip("."), f"{layer}.v".lstrip(".")


def _row_dim(key: str, layers: Mapping[str, object]) -> int:
    """Return the dimension of a tensor that comes first in the file: of factors, the ranks."""
    name = key.rpartition(".")[0]
    return int(name in layers and key == _factors(name)[0])


def _require_same_shapes(
    model: nn.Module,
    layers: Mapping[str, object],
    ranks: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    path: Path,
) -> None:
    expected = {key: [*value.shape] for key, value in model.state_dict().items()}
    for name in layers:
        for key, dim in zip(_factors(name), (1, 0), strict=True):
            expected[key][dim] = ranks.get(name, -1)
    stored = {key: [*shape] for key, shape in shapes.items()}
    keys = expected | stored
    if other := sorted(key for key in keys if expected.get(key) != stored.get(key)):
        raise CheckpointError(
            f"{path} is of another model: {listed(other)} are missing or have other shapes. "
            "Decompose the model like the saved one, then call fully_shard."
        )


def _read_by_all(
    read: Callable[[], dict[str, Tensor]], path: Path, model: nn.Module
) -> dict[str, Tensor]:
    """Read parts; raise an error in every process if one of them cannot read."""
    parts, problem = dict[str, Tensor](), None
    try:
        parts = read()
    except (OSError, CheckpointError) as error:
        problem = error
    everyone = gather_objects(str(problem or ""), shard_group(model))
    if problem is not None:
        raise problem
    if any(everyone):
        process, why = next((i, why) for i, why in enumerate(everyone) if why)
        raise CheckpointError(f"process {process} cannot read its part of {path}: {why}")
    return parts
