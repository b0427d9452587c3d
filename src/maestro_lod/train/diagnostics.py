"""Checks of losses, targets, weights and ranks: the errors and warnings of training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from maestro_lod.distributed.collectives import gather_objects
from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.distributed.shards import is_sharded, local_part
from maestro_lod.errors import LayerError, OptionError, TrainingError, listed
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers, require_low_rank

_MOST_RANKS = 0.9  # a model with more of its ranks left after a third of a training will not shrink
_SMALLER = 0.95  # of the dense parameters: a model above this has not shrunk
_LARGEST_STEP = 1.0  # learning rate over (1 - momentum), times the growth of a step by factoring
_SWING = {  # of one weight around zero, in learning rates; from simulations of the penalty alone
    torch.optim.Adam: 0.036, torch.optim.AdamW: 0.036, torch.optim.RAdam: 0.036,
    torch.optim.NAdam: 0.25, torch.optim.Adamax: 0.008, torch.optim.RMSprop: 0.35,
}  # fmt: skip


# -- losses, targets, weights ----------------------------------------------------------------------


def require_loss(value: Any, *, trained: bool = True) -> Tensor:
    """Return a loss; raise OptionError if it is not one number with a gradient."""
    if not isinstance(value, Tensor):
        raise OptionError(
            f"the loss is {value!r:.60}, not a tensor. Return what torch computed, such as "
            "F.cross_entropy(output, target)."
        )
    if value.numel() != 1:
        raise OptionError(
            f"the loss is a tensor of shape {tuple(value.shape)}, not one number. Return its "
            "mean() or sum()."
        )
    if trained and not value.requires_grad:
        raise OptionError(
            "the loss has no gradient: it was detached, rounded, computed without gradients, or no "
            "parameter that it depends on is trainable."
        )
    return value


def require_trainable(model: nn.Module) -> None:
    """Raise LayerError for parameters that were made in inference mode."""
    in_inference = [name for name, p in model.named_parameters() if p.is_inference()]
    if in_inference and not torch.is_inference_mode_enabled():
        raise LayerError(
            f"parameters that were made in torch.inference_mode() cannot be trained: "
            f"{listed(in_inference, 3)}. Create or load the model outside of it."
        )


def mismatch(output: Any, target: Any, ignored: int) -> OptionError | None:
    """Return the error of targets that are not classes of these scores; None if they are."""
    if target is None:
        return OptionError(
            "the batch has no target. Give pairs (inputs, target), or mappings with 'labels'."
        )
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.ndim == 0:
        return OptionError(
            f"cross-entropy needs scores and classes as tensors, not a {type(output).__name__} and "
            f"a {type(target).__name__}. Give fit a loss=."
        )
    if target.dtype not in (torch.int64, torch.uint8):
        return OptionError(
            f"the targets are {target.dtype}, not classes. Convert them to torch.int64, or give "
            "fit a loss=."
        )
    if output.shape[:-1].numel() != target.numel():
        return OptionError(
            f"scores of shape {tuple(output.shape)} do not fit targets of shape "
            f"{tuple(target.shape)}. Give one target for each row of scores."
        )
    classes, counted = output.shape[-1], target[target != ignored]
    wrong = counted[(counted < 0) | (counted >= classes)]
    if wrong.numel():
        return OptionError(
            f"a target is class {int(wrong[0])}, but the model has scores for classes 0 to "
            f"{classes - 1}. Give the model more outputs, or number the classes from 0."
        )
    return None


def require_finite_loss(loss: Tensor) -> Tensor:
    """Return the loss; raise TrainingError if it is NaN or infinite."""
    if not bool(loss.detach().isfinite().all()):
        raise TrainingError(
            f"the loss is {loss.detach()}. Lower the learning rate or clip gradients; this step "
            "has not changed the weights."
        )
    return loss


def require_finite_parameters(model: nn.Module) -> None:
    """Raise TrainingError if a trained parameter has become NaN or infinite."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    broken = [name for name, value in trained.items() if not local_part(value).isfinite().all()]
    if (group := shard_group(model)) is not None:  # so that all processes raise
        broken = sorted({name for names in gather_objects(broken, group) for name in names})
    if broken:
        raise TrainingError(
            f"the weights of {listed(broken)} are not finite: the loss was NaN or infinite. "
            "Lower the learning rate or clip gradients, and resume from the last good checkpoint."
        )


# -- ranks -----------------------------------------------------------------------------------------


def reachable_importance(layer: LowRank, optimizer: Optimizer, penalty: float) -> float | None:
    """Estimate the lowest importance that useless ranks reach under penalty gradients alone.

    The swing around zero grows with the learning rate. The constants fit simulations of the penalty
    alone, so this is an order of magnitude. None for an optimizer that was not simulated.
    """
    groups = [g for g in optimizer.param_groups if any(p is layer.u for p in g["params"])]
    if not groups:
        return None
    rate = float(groups[0]["lr"])
    if isinstance(optimizer, torch.optim.SGD):
        return float((0.3 * layer.rank * rate * penalty) ** 2)
    swing = _SWING.get(type(optimizer))
    if swing is not None:
        return float((swing * rate) ** 2 * (layer.u.numel() * layer.v.numel()) ** 0.5)
    return None


def stalled_above(
    layers: Mapping[str, LowRank], optimizer: Optimizer, penalty: float, threshold: float
) -> dict[str, float]:
    """Return the layers whose useless ranks stay above a threshold, and at which importance."""
    floors = {n: reachable_importance(m, optimizer, penalty) for n, m in layers.items() if m.rank}
    return {name: floor for name, floor in floors.items() if floor and floor > threshold}


def unshrunk(
    layers: Mapping[str, LowRank], relative_params: float, penalty: float, done: int, epochs: int
) -> str | None:
    """Return a warning that a model does not shrink under its penalty; None if it does.

    It is checked after a third of the epochs and at the end.
    """
    third, last = -(-epochs // 3), done == epochs
    if not penalty or relative_params < _SMALLER or not (last or done == third):
        return None
    left = sum(layer.rank for layer in layers.values())
    full = sum(layer.full_rank for layer in layers.values())
    if not last and left < _MOST_RANKS * full:
        return None
    return (
        f"the model has not shrunk: after {done} of {epochs} epochs {left:,} of {full:,} ranks are "
        f"left, with {relative_params:.2f}× the dense parameters. penalty={penalty:.3g} is too "
        "weak for this model and this many steps. Choose a size instead: "
        "Elastic(model, optimizer, sizes=[0.25]), or budget.params=0.25 in a recipe."
    )


def warn_about_large_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn if SGD's learning rate, which suited dense weights, is too large for their factors.

    A step of the factors moves their product ‖u‖² + ‖v‖² times as far as a step of the dense
    weight, and a layer that started as zero has large factors after some training. Gradients at
    sampled ranks are large too, so that training may diverge.
    """
    if not isinstance(optimizer, SGD):  # the steps of others do not grow with gradients
        return
    rates = {
        id(p): float(group["lr"]) / (1 - min(float(group["momentum"]), 0.999))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    fast = [
        name
        for name, layer in low_rank_layers(model).items()
        if layer.rank and not any(map(is_sharded, layer.stored_factors()))
        if rates.get(id(layer.u), 0.0) * _growth(layer) > _LARGEST_STEP
    ]
    if fast:
        warnings.warn(
            f"SGD's learning rate suits dense weights, but is too large for the factors of these "
            f"layers, whose ranks are sampled from now on: {listed(fast)}. Training may diverge. "
            "Clip gradients (clip_norm=1.0), or lower the learning rate or the momentum.",
            stacklevel=4,  # the caller of end_epoch
        )


def _growth(layer: LowRank) -> float:
    """Return how much faster the first rank moves than the weight that it belongs to."""
    first = layer.u.detach()[:, 0], layer.v.detach()[0]
    return sum(float(part.float().square().sum()) for part in first) if layer.u.requires_grad else 0


def require_ranks_to_train(model: nn.Module, min_rank: int, kind: str) -> dict[str, LowRank]:
    """Return the low-rank layers; raise OptionError if none can be trained or shrunk."""
    layers = require_low_rank(model)
    if not any(m.rank and (m.u.requires_grad or m.v.requires_grad) for m in layers.values()):
        raise OptionError(
            f"{type(model).__name__} has nothing for {kind} to train: every low-rank layer is "
            "frozen or has rank 0. Call requires_grad_(True) on the layers to train."
        )
    if min_rank > (most := max(layer.rank for layer in layers.values())):
        raise OptionError(
            f"min_rank={min_rank} is above the rank of every layer, so that none can shrink: the "
            f"largest rank is {most}. Give a smaller one, or threshold=None not to shrink."
        )
    return layers
