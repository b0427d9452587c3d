"""Losses of a model's outputs without targets, and distances to another model's outputs.

Classifiers and language models return scores, encoders values. Scores are compared as
probabilities, values by their squared distance. transformers names its outputs; for a plain tensor
of scores the user must choose `scores_loss` and `own_scores`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from maestro_lod.errors import OptionError, listed

SoftLoss: TypeAlias = Callable[[Any, Any], Tensor]
"""`soft_loss(output, teacher)`: the distance between the outputs of student and teacher."""

_VALUES = ("last_hidden_state", "image_embeds", "text_embeds", "embeddings")


def scores_loss(output: Any, teacher: Any) -> Tensor:
    """Compute the cross-entropy of class scores with those of a teacher, for `distill`.

    Args:
        output: A tensor of scores, classes last, or an output with `logits`.
        teacher: The teacher's output.

    Returns:
        The mean over all positions.

    Raises:
        OptionError: If an output has several tensors and none with a known name.

    Example:
        >>> lod.scores_loss(torch.zeros(4, 2), torch.zeros(4, 2))
        tensor(0.6931)
    """
    scores, targets = (_main(each).float().flatten(0, -2) for each in (output, teacher))
    return F.cross_entropy(scores, targets.softmax(-1))


def values_loss(output: Any, teacher: Any) -> Tensor:
    """Compute the mean squared distance to a teacher's values, relative to their mean square."""
    values, targets = _main(output).float(), _main(teacher).float()
    return F.mse_loss(values, targets) / targets.square().mean().clamp_min(1e-12)


def soft_loss_for(output: Any) -> SoftLoss:
    """Return the loss for this type of output: `scores_loss` if it has `logits`, else of values."""
    return scores_loss if _names_scores(output) else values_loss


def own_scores(output: Any, target: Any = None) -> Tensor:
    """Compute a loss of class scores without targets, for `calibrate`.

    It is the cross-entropy with classes drawn from the output. The expected square of its gradient
    is the Fisher information, which is the curvature of `scores_loss` at the teacher.

    Args:
        output: A tensor of scores, classes last, or an output with `logits`.
        target: Not used.

    Returns:
        The mean over all positions.

    Raises:
        OptionError: If the output has several tensors and none with a known name.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 10))
        >>> calibration = lod.calibrate(model, [torch.randn(100, 64)], loss=lod.own_scores)
    """
    scores = _main(output).float().flatten(0, -2)
    drawn = torch.multinomial(scores.detach().softmax(-1), 1, generator=_generator(scores))
    return F.cross_entropy(scores, drawn[:, 0])


def own_values(output: Any, target: Any = None) -> Tensor:
    """Compute a loss of values without targets, for `calibrate`: a product with random numbers.

    The expected square of its gradient weights all values the same.

    Args:
        output: A tensor of values, or an output of transformers.
        target: Not used.

    Returns:
        The mean over the batch.

    Raises:
        OptionError: If the output has several tensors and none with a known name.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 10))
        >>> calibration = lod.calibrate(model, [torch.randn(100, 64)], loss=lod.own_values)
    """
    values = _main(output).float()
    drawn = torch.randn(values.shape, generator=_generator(values), device=values.device)
    return (values * drawn).sum() / values.shape[0]


def own_outputs(output: Any, target: Any = None) -> Tensor:
    """Compute `own_scores` if the output has `logits`, else `own_values`."""
    return (own_scores if _names_scores(output) else own_values)(output)


def _names_scores(output: Any) -> bool:
    return getattr(output, "logits", None) is not None


def _generator(output: Tensor) -> torch.Generator:
    """Return a generator seeded by the output, so that equal data gives equal calibrations."""
    seed = int(output.detach().double().abs().sum().nan_to_num().remainder(2**31))
    return torch.Generator(output.device).manual_seed(seed)


def _main(output: Any) -> Tensor:
    """Return the tensor of an output to compare."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", *_VALUES):
        if isinstance(value := getattr(output, name, None), Tensor):
            return value
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    raise OptionError(
        f"the output is a {type(output).__name__} with {len(tensors)} tensors, none of which is "
        f"named {listed(('logits', *_VALUES))}. Give soft_loss=lambda output, teacher: …"
    )
