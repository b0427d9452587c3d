"""Losses of a model's outputs alone, and distances to another model's outputs.

The output of a classifier or language model is scores; of an encoder it is values. Scores are
compared as probabilities, values by their squared distance. transformers says which of them a model
gives; a plain tensor may be either, so that scores have to be called so.
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
"""`soft_loss(output, teacher)`: the distance of an output to a teacher's."""

_VALUES = ("last_hidden_state", "image_embeds", "text_embeds", "embeddings")


def scores_loss(output: Any, teacher: Any) -> Tensor:
    """Return the cross-entropy of class scores, in the last dimension, with a teacher's."""
    given, wanted = (_main(each).float().flatten(0, -2) for each in (output, teacher))
    return F.cross_entropy(given, wanted.softmax(-1))


def values_loss(output: Any, teacher: Any) -> Tensor:
    """Return the squared distance to a teacher's values, relative to their own mean square."""
    given, wanted = _main(output).float(), _main(teacher).float()
    return F.mse_loss(given, wanted) / wanted.square().mean().clamp_min(1e-12)


def soft_loss_for(output: Any) -> SoftLoss:
    """Return the loss for outputs like this one: of scores if it has `logits`, else of values."""
    return scores_loss if _names_scores(output) else values_loss


def own_scores(output: Any, target: Any = None) -> Tensor:
    """Return a loss whose gradients measure changes of the probabilities of class scores.

    It is the cross-entropy with classes that are drawn from the output itself: the expected square
    of its gradient is the Fisher information, the curvature of `scores_loss` at the teacher.
    """
    scores = _main(output).float().flatten(0, -2)
    drawn = torch.multinomial(scores.detach().softmax(-1), 1, generator=_generator(scores))
    return F.cross_entropy(scores, drawn[:, 0])


def own_values(output: Any, target: Any = None) -> Tensor:
    """Return a loss whose gradients measure changes of values: a product with random numbers."""
    values = _main(output).float()
    drawn = torch.randn(values.shape, generator=_generator(values), device=values.device)
    return (values * drawn).sum() / values.shape[0]


def own_outputs(output: Any, target: Any = None) -> Tensor:
    """Return `own_scores` if the output has `logits`, else `own_values`."""
    return (own_scores if _names_scores(output) else own_values)(output)


def _names_scores(output: Any) -> bool:
    return getattr(output, "logits", None) is not None


def _generator(like: Tensor) -> torch.Generator:
    """Return a generator that depends on the output alone: the same data, the same calibration."""
    seed = int(like.detach().double().abs().sum().nan_to_num().remainder(2**31))
    return torch.Generator(like.device).manual_seed(seed)


def _main(output: Any) -> Tensor:
    """Return the tensor in an output that is compared."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", *_VALUES):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    raise OptionError(
        f"the output is a {type(output).__name__} with {len(tensors)} tensors, and none of them is "
        f"named {listed(('logits', *_VALUES))}. Give soft_loss=lambda output, teacher: …"
    )
