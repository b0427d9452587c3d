"""The same file from shards and into them: no process ever holds more than one tensor whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from maestro_lod.distributed.fsdp import adopt_shards, put_shard, reshard
from maestro_lod.distributed.processes import Group, told_by
from maestro_lod.distributed.shards import gathered, is_sharded, local_part, part_of
from maestro_lod.errors import CheckpointError, listed
from maestro_lod.layers.ranks import low_rank_layers


def write_by_the_first(
    tensors: Mapping[str, Tensor],
    order: Sequence[str],
    write: Callable[[], None],
    path: Path,
    group: Group,
) -> None:
    """Let the first process of a group write tensors; the others give their parts in turn.

    `write` asks for each tensor once, in this order.
    """
    first = group.rank() == 0
    order, trouble = told_by(0, (order, _trouble(path, tensors) if first else ""), group)
    if trouble:
        raise CheckpointError(trouble)
    if first:
        write()
    else:
        for key in order:
            if tensors[key].numel():
                gathered(tensors[key])
    told_by(0, None, group)  # nobody goes on before the file is there


def _trouble(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Return why a file cannot be written, '' if nothing speaks against it.

    Once tensors are on their way, an error of one process is a wait for the others.
    """
    folder, needed = path.absolute().parent, sum(value.nbytes for value in tensors.values())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return f"{path} cannot be written: {folder} is no directory that can be written to."
    if (free := shutil.disk_usage(folder).free) < needed:
        return f"{path} needs {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free there."
    return ""


@torch.no_grad()
def fill_shards(
    model: nn.Module,
    ranks: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
    path: Path,
) -> None:
    """Fill a sharded model, in place, with tensors of a file; each process keeps its parts.

    `shapes` are those of all tensors at these ranks, `read` returns one of them.
    """
    adopt_shards(model)
    reshard(model)
    layers = low_rank_layers(model)
    here = {key: [*value.shape] for key, value in model.state_dict().items()}
    for name in layers:
        for key, dim in (("u", 1), ("v", 0)):
            here[f"{name}.{key}".lstrip(".")][dim] = ranks.get(name, -1)
    there = {key: [*shape] for key, shape in shapes.items()}
    if other := sorted(key for key in here | there if here.get(key) != there.get(key)):
        raise CheckpointError(
            f"{path} is of another model: {listed(other)} are missing or have other shapes. A "
            "sharded model has to be decomposed as the saved one was, before fully_shard."
        )
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, shape in there.items():
        name, _, last = key.rpartition(".")
        if name in layers and last in ("u", "v") and layers[name].sharded:
            like = layers[name].stored_factors()["uv".index(last)]
            part = part_of(read(key), like, shape).to(like.device, like.dtype)  # type: ignore[arg-type]
            own_part = part.clone(memory_format=torch.contiguous_format)
            put_shard(layers[name], last, own_part, ranks[name])
        elif key in own:
            value, whole = own[key], read(key)
            part = part_of(whole, value, shape) if is_sharded(value) else whole  # type: ignore[arg-type]
            local_part(value.detach()).copy_(part)
