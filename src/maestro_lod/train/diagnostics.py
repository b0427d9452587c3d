"""Checks of losses, targets, weights and progress: every refusal and warning of training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from maestro_lod.distributed.collectives import told_by_all
from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.distributed.shards import is_sharded, local_part
from maestro_lod.errors import LayerError, OptionError, TrainingError, listed
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers, require_low_rank

_MOST_RANKS = 0.9  # a model that keeps more of its ranks for a third of a training will not shrink
_SMALLER = 0.95  # of the dense parameters: a model that is not below this has not become smaller
_LARGEST_STEP = 1.0  # learning rate over (1 - momentum), times the growth of a step by factoring
_SWING = {  # of one weight around zero, in learning rates; from simulations of the penalty alone
    torch.optim.Adam: 0.036, torch.optim.AdamW: 0.036, torch.optim.RAdam: 0.036,
    torch.optim.NAdam: 0.25, torch.optim.Adamax: 0.008, torch.optim.RMSprop: 0.35,
}  # fmt: skip


# -- losses, targets, weights ----------------------------------------------------------------------


def require_loss(value: Any, *, trained: bool = True) -> Tensor:
    """Return a loss, or refuse what is not one number that gradients can come from."""
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
    """Refuse parameters that autograd cannot use, because of where they were made."""
    made_so = [name for name, p in model.named_parameters() if p.is_inference()]
    if made_so and not torch.is_inference_mode_enabled():
        raise LayerError(
            f"{listed(made_so, 3)} were made in torch.inference_mode() and can never be trained. "
            "Make or load the model outside of it."
        )


def mismatch(output: Any, target: Any, ignored: int) -> OptionError | None:
    """Say why targets are no classes of these scores; None if nothing is wrong with them."""
    if target is None:
        return OptionError(
            "the batch has no target. Give pairs (inputs, target), or mappings with 'labels'."
        )
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.ndim == 0:
        return OptionError(
            f"cross-entropy needs scores and classes as tensors, not a {type(output).__name__} and "
            f"a {type(target).__name__}. Give a loss of your own."
        )
    if target.dtype not in (torch.int64, torch.uint8):
        return OptionError(
            f"the targets are {target.dtype}, not classes. Give them as torch.int64, or a loss of "
            "your own."
        )
    if output.shape[:-1].numel() != target.numel():
        return OptionError(
            f"scores of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)} do "
            "not belong together: there must be one target for each row of scores."
        )
    classes, counted = output.shape[-1], target[target != ignored]
    wrong = counted[(counted < 0) | (counted >= classes)]
    if wrong.numel():
        return OptionError(
            f"a target is class {int(wrong[0])}, but the model gives scores for {classes}, 0 to "
            f"{classes - 1}. Give it more outputs, or number the classes from 0 on."
        )
    return None


def require_finite_loss(loss: Tensor) -> Tensor:
    """Return the loss, or refuse one that is NaN or infinite."""
    if not bool(loss.detach().isfinite().all()):
        raise TrainingError(
            f"the loss is {loss.detach()}. Lower the learning rate or clip gradients; the weights "
            "are as they were before this step."
        )
    return loss


def require_finite_parameters(model: nn.Module) -> None:
    """Refuse a model of which a parameter that is trained has become NaN or infinite."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    broken = [name for name, value in trained.items() if not local_part(value).isfinite().all()]
    if (group := shard_group(model)) is not None:  # of others, for all to stop alike
        broken = sorted({name for names in told_by_all(broken, group) for name in names})
    if broken:
        raise TrainingError(
            f"the weights of {listed(broken)} are not finite: the loss was NaN or infinite. "
            "Lower the learning rate or clip gradients, and go on from the last good checkpoint."
        )


# -- ranks -----------------------------------------------------------------------------------------


def reachable_importance(layer: LowRank, optimizer: Optimizer, penalty: float) -> float | None:
    """Estimate where the importance of useless ranks stalls under penalty gradients alone.

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
    """Return the layers whose useless ranks stall above a threshold, and where."""
    floors = {n: reachable_importance(m, optimizer, penalty) for n, m in layers.items() if m.rank}
    return {name: floor for name, floor in floors.items() if floor and floor > threshold}


def unshrunk(
    layers: Mapping[str, LowRank], relative_params: float, penalty: float, done: int, epochs: int
) -> str | None:
    """Say that a model under a penalty does not shrink, and what to change; None if it does.

    It is looked at when a third of the epochs is done, and at the end.
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
        f"left, {relative_params:.2f}× of the dense parameters. penalty={penalty:.3g} is too weak "
        "for this model and this many steps. Choose a size instead: "
        "BudgetTraining(model, optimizer, params=0.25), or budget.params=0.25 in a recipe."
    )


def warn_of_large_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn if SGD, which suited weights that were trained whole, is too fast for their factors.

    A step of factors moves their product by ‖u‖² + ‖v‖² times what the dense weight would move by,
    and a layer that was zero has large factors once it has been trained. At sampled ranks gradients
    are large too, so that training falls apart and does not come back.
    """
    if not isinstance(optimizer, SGD):  # others go by the signs of gradients
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
            f"SGD's learning rate suits dense weights, but is too large for the factors of "
            f"{listed(fast)}, whose ranks are sampled from now on: training may fall apart. Clip "
            "gradients (clip_norm=1.0), or lower the learning rate or the momentum.",
            stacklevel=4,  # whoever ends the epoch
        )


def _growth(layer: LowRank) -> float:
    """Return how much faster the first rank moves than the weight that it is part of."""
    first = layer.u.detach()[:, 0], layer.v.detach()[0]
    return sum(float(part.float().square().sum()) for part in first) if layer.u.requires_grad else 0


def require_ranks_to_train(model: nn.Module, min_rank: int, kind: str) -> dict[str, LowRank]:
    """Return the low-rank layers; raise OptionError if none of them could train or shrink."""
    layers = require_low_rank(model)
    if not any(m.rank and (m.u.requires_grad or m.v.requires_grad) for m in layers.values()):
        raise OptionError(
            f"{type(model).__name__} has nothing for {kind} to train: every low-rank layer is "
            "frozen or has rank 0. Call requires_grad_(True) on those to train."
        )
    if min_rank > (most := max(layer.rank for layer in layers.values())):
        raise OptionError(
            f"min_rank={min_rank} is above the rank of every layer: none could ever shrink. The "
            f"largest has {most}; give less, or threshold=None not to shrink."
        )
    return layers
