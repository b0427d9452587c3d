"""Remove useless ranks from weights and optimizer state."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.ddp import find_live_wrappers, release, renew, require_renewable
from maestro_lod.distributed.decision import agree_on_ranks
from maestro_lod.distributed.fsdp import adopt_shards, cut_shard, reshard, shard_group
from maestro_lod.distributed.shards import narrowed, zero_behind_
from maestro_lod.errors import (
    LayerError,
    TrainingError,
    listed,
    require_nonnegative,
    require_whole,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers, require_low_rank
from maestro_lod.sizes.averages import require_no_other_average
from maestro_lod.train.penalty import importance

logger = logging.getLogger(__name__)

_TRAINERS = ("accelerate", "lightning", "pytorch_lightning")


def shrink(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    threshold: float,
    min_rank: int = 0,
    ema: AveragedModel | None = None,
) -> dict[str, int]:
    """Remove the ranks of every layer with importance ≤ threshold, in place.

    >>> lost = shrink(model, optimizer, threshold=1e-6)

    Parameters, their gradients and the optimizer's state become smaller; the remaining values do
    not change. If several processes train the model, each calls this, and process 0 decides.

    Args:
        model: A model with low-rank layers, also in a live DDP or FSDP2 wrapper.
        optimizer: The optimizer that trains it, if there is one.
        threshold: The importance at or below which ranks are removed.
        min_rank: The smallest rank of a layer.
        ema: An averaged copy of the model that is cut to the same ranks.

    Returns:
        The number of removed ranks by layer, without layers that lost none.

    Raises:
        LayerError: The model has no low-rank layers, or `ema` is of another model.
        TrainingError: Weights are not finite, or the optimizer does not support a shrink.
    """
    if optimizer is not None:
        optimizer = unwrapped_optimizer(optimizer)
    adopt_shards(model)
    wrappers = find_live_wrappers(model)
    return cut(model, ranks_above(model, threshold, min_rank), optimizer, ema, wrappers)


def ranks_above(model: nn.Module, threshold: float, min_rank: int = 0) -> dict[str, int]:
    """Return the rank that each layer keeps at a threshold on `importance`."""
    threshold = require_nonnegative("threshold", threshold)
    min_rank = require_whole("min_rank", min_rank)
    values = importance(model)
    broken = [name for name, value in values.items() if not bool(value.isfinite().all())]
    if broken:
        raise TrainingError(
            f"the weights of {listed(broken)} are not finite: the loss was NaN or infinite. "
            "Lower the learning rate or clip gradients, and resume from the last good checkpoint."
        )
    return {
        name: max(int((value > threshold).sum()), min(min_rank, len(value)))
        for name, value in values.items()
    }


def cut(
    model: nn.Module,
    ranks: Mapping[str, int],
    optimizer: Optimizer | None = None,
    ema: AveragedModel | None = None,
    wrappers: Sequence[DistributedDataParallel] = (),
) -> dict[str, int]:
    """Cut layers to these ranks, in place, and return the number of removed ranks by layer.

    The optimizer's state, the averaged copy and the wrappers of the model are cut too.
    """
    layers = require_low_rank(model)
    if optimizer is not None:
        require_optimizer(model, optimizer)
    averaged = _averaged_layers(ema, layers) if ema is not None else {}
    for wrapper in wrappers:
        require_renewable(wrapper)
    group = wrappers[0].process_group if wrappers else shard_group(model)
    if group is not None:
        ranks = agree_on_ranks(ranks, importance(model), group)
    # FSDP cannot hold parameters without elements: one rank of zeros stays there
    ranks = {name: max(rank, int(layers[name].sharded)) for name, rank in ranks.items()}
    lost = {name: layers[name].rank - r for name, r in ranks.items() if r < layers[name].rank}
    if lost:
        require_no_other_average(model, ema)
        reshard(model)
        for wrapper in wrappers:
            release(wrapper)
    for name in lost:
        _cut_layer(layers[name], ranks[name], optimizer)
        if ema is not None:
            _cut_layer(averaged[name], ranks[name], None)
    if lost:
        for wrapper in wrappers:
            renew(wrapper)
        _forget_compiled_code()
    return lost


def _forget_compiled_code() -> None:
    """Drop compiled graphs of the old shapes, which count towards the limit of recompilations.

    Above the limit nothing is compiled, and fullgraph=True is an error. All compiled code of this
    process is compiled again, once per shrink.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of Accelerate and Lightning.

    The wrappers share its parameter groups and state, but have no step hooks.
    """
    while type(optimizer).__module__.partition(".")[0] in _TRAINERS:
        inner: Any = optimizer
        optimizer = inner.optimizer
    return optimizer


def require_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise TrainingError if an optimizer cannot be shrunk, or lacks trainable factors."""
    if not hasattr(optimizer, "param_groups"):
        raise TrainingError(f"{optimizer!r} is not an optimizer. Give SGD(model.parameters(), …).")
    if isinstance(optimizer, LBFGS):
        raise TrainingError(
            "LBFGS has one flat vector as its state, which cannot be shrunk. Use another optimizer."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TrainingError(
            f"{type(optimizer).__name__} evaluates the loss in its steps, by a closure, which "
            "methods cannot follow. Use another optimizer."
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise TrainingError(
            "ZeroRedundancyOptimizer assigns parameters to processes once, so that they cannot be "
            "shrunk. Use fully_shard (FSDP2) to shard optimizer state."
        )
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        f"{name}.{key}".lstrip(".")
        for name, layer in low_rank_layers(model).items()
        for key, p in zip("uv", layer.stored_factors(), strict=True)
        if p.requires_grad and id(p) not in in_optimizer
    ]
    if missing:
        raise TrainingError(
            f"the optimizer does not hold these parameters of the model: {listed(missing)}. "
            "Create one for the whole model after decompose: SGD(model.parameters(), …); use "
            "parameter groups for different settings."
        )


@torch.no_grad()
def clear_moments(layer: LowRank, rank: int, optimizer: Optimizer) -> None:
    """Set the optimizer's state of all ranks behind `rank` to zero, in place.

    For ranks that are zero in both factors: they get no gradient, and without momentum they stay
    zero until they are cut.
    """
    for parameter, dim in zip(layer.stored_factors(), (1, 0), strict=True):
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                zero_behind_(value, dim, rank)


def require_averaged(ema: AveragedModel) -> AveragedModel:
    """Return an averaged copy of a model; raise LayerError if it is something else."""
    if not isinstance(ema, AveragedModel):
        raise LayerError(
            f"ema is not an averaged model: {type(ema).__name__}. Give an AveragedModel(model)."
        )
    return ema


def _averaged_layers(ema: AveragedModel, layers: Mapping[str, LowRank]) -> dict[str, LowRank]:
    require_averaged(ema)
    averaged = low_rank_layers(ema.module)  # also inside a wrapper
    if {n: m.rank for n, m in averaged.items()} != {n: m.rank for n, m in layers.items()}:
        raise LayerError(
            "the averaged model has other low-rank layers or ranks than the model. Create "
            "AveragedModel(model) after decompose, and pass it to every shrink."
        )
    return averaged


@torch.no_grad()
def _cut_layer(layer: LowRank, rank: int, optimizer: Optimizer | None) -> None:
    for key, dim in (("u", 1), ("v", 0)):
        if layer.sharded:
            old, new = cut_shard(layer, key, rank)
        else:
            old, new = _cut_factor(layer, key, dim, rank)
        _move_hooks(old, new)
        vars(new).update(vars(old))  # attributes of the user
        if optimizer is not None:
            _swap_parameter(optimizer, old, new, dim)
    layer.freeze_if_empty()


def _cut_factor(layer: LowRank, key: str, dim: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    old: nn.Parameter = getattr(layer, key)
    new = nn.Parameter(old.narrow(dim, 0, rank).clone(), requires_grad=old.requires_grad)
    if old.grad is not None and rank:
        new.grad = old.grad.narrow(dim, 0, rank).clone()
    setattr(layer, key, new)
    return old, new


def _move_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    # the same dicts: the handles of users remove hooks from them
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def _swap_parameter(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, dim: int) -> None:
    for group in optimizer.param_groups:
        # in place, because schedulers and wrappers share the list
        group["params"][:] = [new if p is old else p for p in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = _sliced_state(optimizer.state.pop(old), old, new, dim)


def _sliced_state(
    state: dict[str, Any], old: nn.Parameter, new: nn.Parameter, dim: int
) -> dict[str, Any]:
    """Return the state with its tensors cut like the parameter."""
    sliced = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            sliced[key] = value  # step counters and options
        elif value.ndim == old.ndim and value.shape[dim] == old.shape[dim]:
            sliced[key] = narrowed(value, dim, new.shape[dim])
        elif value.numel() == 1 or (value.ndim == old.ndim and value.shape[dim] == 1):
            sliced[key] = value  # averaged over the ranks, as Adafactor's moments are
        else:
            logger.warning(
                "optimizer state %r of shape %s cannot be matched to a parameter of shape %s; "
                "the state of that parameter is dropped",
                key, tuple(value.shape), tuple(old.shape),
            )  # fmt: skip
            return {}
    return sliced
