"""What users hand to training, looked at before torch stumbles: losses, targets, weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import LayerError, OptionError, listed


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
