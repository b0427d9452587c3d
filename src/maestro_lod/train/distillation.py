"""What the sampled pass learns from the full one: its predictions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from maestro_lod.errors import OptionError


def soft_cross_entropy(output: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of scores (N, classes, …) with a teacher's as probabilities."""
    return F.cross_entropy(output, teacher.softmax(1))


def require_class_scores(output: Any) -> None:
    """Refuse an output of which nobody can tell where the scores of classes are."""
    way_out = (
        "Say how to compare it: backward(…, soft_loss=lambda output, teacher: …), or in fit a loss "
        "with a method soft(output, teacher, target)."
    )
    if not isinstance(output, Tensor) or output.ndim in (0, 1, 3):  # 3: classes second or last?
        given = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise OptionError(
            f"distill=True compares scores of shape (N, classes) or (N, classes, height, width); "
            f"the output is {given}. {way_out}"
        )
    if output.shape[1] < 2:
        raise OptionError(
            "distill=True compares scores of classes, but the output has a single score, from "
            f"which nothing would be learned. {way_out}"
        )
