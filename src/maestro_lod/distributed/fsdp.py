"""FSDP2: find the sharded factors of a model, and replace them by smaller ones.

FSDP2 has an object for each parameter, which sets the gathered parameter or this process's part in
the module. A parameter that is replaced in the module alone would come back at the next forward.
The object is therefore initialized again, in place, for the smaller parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from maestro_lod.distributed.collectives import Group
from maestro_lod.distributed.shards import Cut, first_ranks, is_sharded
from maestro_lod.errors import LayerError, listed
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers

_KEYS = ("u", "v")


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # one at most, before torch 2.12
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            yield from group.fsdp_params


def adopt_shards(model: nn.Module) -> None:
    """Give every layer FSDP's objects for its factors; raise LayerError for other shards."""
    holders_by_name = {
        (id(p._module_info.module), p._module_info.param_name): p for p in _fsdp_parameters(model)
    }
    layers = low_rank_layers(model)
    for layer in layers.values():
        holders = [holders_by_name.get((id(layer), key)) for key in _KEYS]
        layer.__dict__["_holders"] = None if None in holders else tuple(holders)
    _require_known_shards(model, layers)


def _require_known_shards(model: nn.Module, layers: dict[str, LowRank]) -> None:
    parallel, subclassed = [], []
    for name, layer in layers.items():
        for key, factor in zip(_KEYS, layer.stored_factors(), strict=True):
            full_name = f"{name}.{key}".lstrip(".")
            holder = layer.__dict__["_holders"]
            if is_sharded(factor) and (holder is None or holder[0].is_dtensor):
                parallel.append(full_name)
            elif type(factor) is not nn.Parameter and not is_sharded(factor):
                subclassed.append(full_name)
    if parallel:
        raise LayerError(
            "these parameters are DTensors that were not made by FSDP2 but, for example, by a "
            f"tensor parallel plan, and cannot be shrunk: {listed(parallel)}. Shard with "
            "fully_shard alone, or leave these layers dense with decompose(…, skip=…)."
        )
    wrapped = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if subclassed or wrapped:
        raise LayerError(
            f"FullyShardedDataParallel or a tensor subclass holds parameters, which cannot be "
            f"shrunk: {listed(subclassed)}. Use fully_shard (FSDP2) or DistributedDataParallel."
        )


def shard_group(model: nn.Module) -> Group | None:
    """Return the process group over which a model's factors are sharded; None if they are not."""
    if not (dist.is_available() and dist.is_initialized()):
        return None  # called in every step: walking a model takes time
    for layer in low_rank_layers(model).values():
        for factor in layer.stored_factors():
            if is_sharded(factor) and Cut.from_tensor(factor) is not None:  # type: ignore[arg-type]
                mesh = factor.device_mesh  # type: ignore[attr-defined]
                return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    return None


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that all modules hold their shards."""
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def without_fsdp(model: nn.Module) -> Iterator[list[Any]]:
    """Give modules the classes that they had before `fully_shard`, inside the `with` block.

    FSDP's classes refuse to be copied.

    Yields:
        What FSDP stores in the modules.
    """
    modules = [(module, type(module)) for module in _fsdp_modules(model)]
    stored = [
        value
        for module in model.modules()
        for key, value in vars(module).items()
        if key.startswith("__composable_api")
    ]
    for module, kind in modules:
        module.__class__ = kind.__bases__[1]
    try:
        yield stored
    finally:
        for module, kind in modules:
            module.__class__ = kind


@torch.no_grad()
def cut_shard(layer: LowRank, key: str, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Replace a sharded factor by its first ranks; return the old parameter and the new one."""
    holder = layer.__dict__["_holders"][_KEYS.index(key)]
    old, dim = holder.sharded_param, 1 if key == "u" else 0
    grad = None if old.grad is None else first_ranks(old.grad, dim, rank)
    new = put_shard(layer, key, first_ranks(old, dim, rank), rank)
    if grad is not None:
        new.grad = holder.to_sharded_dtensor(grad)
    return old, new


@torch.no_grad()
def put_shard(layer: LowRank, key: str, part: torch.Tensor, rank: int) -> nn.Parameter:
    """Replace a sharded factor by one of another rank, given this process's part; return it."""
    holder = layer.__dict__["_holders"][_KEYS.index(key)]
    old, dim = holder.sharded_param, 1 if key == "u" else 0
    shape = [rank if d == dim else size for d, size in enumerate(old.shape)]
    _renew(holder, torch.empty(shape, dtype=old.dtype, device="meta"), old.requires_grad)
    new = nn.Parameter(holder.to_sharded_dtensor(part), requires_grad=old.requires_grad)
    holder._setattr_on_modules(new)
    holder.reset_sharded_param()
    return new


def _renew(holder: Any, whole: torch.Tensor, requires_grad: bool) -> None:
    """Initialize FSDP's object for a parameter again, for another shape."""
    kept = {key: vars(holder)[key] for key in ("_param_fqn",) if key in vars(holder)}
    placement, offload = holder.fsdp_placement, _offload_policy(holder)
    holder._post_load_hook_handle.remove()
    vars(holder).pop("_unsharded_param", None)
    holder.__init__(
        nn.Parameter(whole, requires_grad=requires_grad),
        holder._module_info,
        holder.mesh_info,
        holder.post_forward_mesh_info,
        holder.device,
        lambda _: placement,
        holder.mp_policy,
        offload,
    )
    vars(holder).update(kept)


def _offload_policy(holder: Any) -> Any:
    fsdp = sys.modules["torch.distributed.fsdp"]
    if holder.offload_to_cpu:
        return fsdp.CPUOffloadPolicy(pin_memory=holder.pin_memory)
    return fsdp.OffloadPolicy()


def across_ranks(model: nn.Module) -> Callable[[nn.Parameter], Any]:
    """Return a placement function for `fully_shard` that keeps a part of every rank everywhere.

    By default FSDP2 shards `v` along its ranks, and pads it if it has fewer ranks than there are
    processes. Sharded along the other dimension, every process has a part of every rank, and no
    rank is sent at a shrink. Where the inputs of a layer cannot be divided evenly, and for all
    other parameters, FSDP2's default remains.

    >>> fully_shard(block, shard_placement_fn=across_ranks(model))

    Args:
        model: A model with low-rank layers, before it is sharded.

    Returns:
        The function for `shard_placement_fn`.
    """
    factors = {id(layer.v): layer.v for layer in low_rank_layers(model).values()}

    def placement(parameter: nn.Parameter) -> Any:
        world = dist.get_world_size()
        if id(parameter) in factors and parameter.shape[1] % world == 0:
            return sys.modules["torch.distributed.tensor"].Shard(1)
        return None

    return placement
