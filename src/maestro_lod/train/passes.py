"""The passes of a training step: one at the ranks drawn for it, maybe one at full rank before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from maestro_lod.errors import OptionError, require_bool
from maestro_lod.train.checks import require_loss
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.finite import require_finite_loss


@dataclass(frozen=True)
class Passes:
    """Which passes a step has, and what the sampled one learns from."""

    full_pass: bool
    distill: bool
    """Whether the sampled pass is trained on the predictions of the full one."""
    elastic: bool = False
    """Whether it has both, and learns from the target where nobody can compare two outputs."""

    @classmethod
    def of(cls, sampling: object, full_pass: bool, distill: bool) -> Passes:
        """Return the passes that were asked for; elastic training has all of them."""
        if isinstance(sampling, Elastic):
            return cls(True, True, elastic=True)
        return cls(full_pass, distill)

    def __post_init__(self) -> None:
        require_bool("full_pass", self.full_pass)
        if require_bool("distill", self.distill) and not self.full_pass:
            raise OptionError("distill=True needs the full pass as its teacher: full_pass=True.")

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        sampled: AbstractContextManager[object],
        weight: float,
        soft_loss: Callable[[Any, Any], Tensor] | None,
        *,
        whole: bool,
    ) -> Tensor:
        """Do each pass with its own backward, the sampled one inside `sampled`; sum the losses.

        A step that trains the `whole` model anyway has no other pass at full rank.
        """
        total: Tensor | float = 0.0
        teaches = False
        if self.full_pass and not whole:
            output = forward()
            teaches = self.distill and self._require_comparable(output, soft_loss)
            full_loss = require_finite_loss(require_loss(loss(output)) * weight)
            output = tree_map_only(Tensor, Tensor.detach, output) if teaches else None
            full_loss.backward()  # type: ignore[no-untyped-call]
            total = full_loss.detach()
        with sampled:
            # no name for this pass's output: it is freed before the backward, if nobody needs it
            if teaches:
                data_loss = (soft_loss or soft_cross_entropy)(forward(), output)
            else:
                data_loss = require_loss(loss(forward()))
            sampled_loss = require_finite_loss(data_loss * weight)
            sampled_loss.backward()  # type: ignore[no-untyped-call]
        return sampled_loss.detach() + total

    def on_the_same_weights(self, *, whole: bool) -> int:
        """Return how many passes of a step run most layers at full rank."""
        return 2 if self.full_pass and not self.elastic and not whole else 1

    def _require_comparable(self, output: Any, soft_loss: object) -> bool:
        """Say whether the sampled pass can learn from an output; only elastic passes need not."""
        obstacle = "" if soft_loss is not None else _obstacle_to_comparing(output)
        if obstacle and not self.elastic:
            raise OptionError(
                f"distill=True compares scores of {obstacle}. Say how to compare it: backward(…, "
                "soft_loss=lambda output, teacher: …), or in fit a loss with a method "
                "soft(output, teacher, target)."
            )
        return not obstacle


def soft_cross_entropy(output: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of scores (N, classes, …) with a teacher's as probabilities."""
    return F.cross_entropy(output, teacher.softmax(1))


def _obstacle_to_comparing(output: Any) -> str:
    """Return why nobody can tell where an output's scores of classes are, '' if one can."""
    if not isinstance(output, Tensor) or output.ndim in (0, 1, 3):  # 3: classes second or last?
        given = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        return f"shape (N, classes) or (N, classes, height, width); the output is {given}"
    if output.shape[1] < 2:
        return "classes, but the output has a single score, from which nothing would be learned"
    return ""
