"""What users hand to training, looked at before torch stumbles: losses, targets, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import (
    LayerError,
    OptionError,
    TrainingError,
    listed,
    require_nonnegative,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import require_low_rank


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


def require_threshold(threshold: float | None, *, needed: bool) -> float | None:
    """Return the importance at or below which ranks are removed; None removes none."""
    if threshold is None and needed:
        raise OptionError("a budget has to remove ranks: leave threshold=None out.")
    return None if threshold is None else require_nonnegative("threshold", threshold)


def require_ranks_left(keep: Mapping[str, int], threshold: float | None, penalty: float) -> None:
    """Refuse a shrink that would leave nothing."""
    if threshold is not None and not any(keep.values()):
        raise TrainingError(
            f"every rank of every layer is at or below threshold={threshold}: nothing would be "
            f"left. Lower penalty={penalty} or set min_rank=1."
        )


def require_ranks_to_train(model: nn.Module, min_rank: int) -> dict[str, LowRank]:
    """Return the low-rank layers, or refuse what could not train or shrink any of them."""
    layers = require_low_rank(model)
    if not any(m.rank and (m.u.requires_grad or m.v.requires_grad) for m in layers.values()):
        raise OptionError(
            f"{type(model).__name__} has nothing for LoD to train: every low-rank layer is frozen "
            "or has rank 0. Call requires_grad_(True) on those to train."
        )
    if min_rank > (most := max(layer.rank for layer in layers.values())):
        raise OptionError(
            f"min_rank={min_rank} is above the rank of every layer: none could ever shrink. The "
            f"largest has {most}; give less, or threshold=None not to shrink."
        )
    return layers


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
