"""The penalty of a training: λ, applied by a loss, by gradients or by proximal steps."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

from torch import Tensor
from torch.optim import Optimizer

from maestro_lod.errors import OptionError, TrainingError, listed, require_nonnegative
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.train.diagnostics import stalled_above
from maestro_lod.train.penalty import (
    add_group_lasso_gradients,
    prox_layers_,
    weighted_group_lasso,
)
from maestro_lod.train.shrink import clear_moments
from maestro_lod.train.steps import call_after_steps


class RankPenalty:
    """Applies λ times the group lasso: as a loss, as gradients, or as proximal steps."""

    def __init__(
        self, value: float, layers: Mapping[str, LowRank], optimizer: Optimizer, *, proximal: bool
    ) -> None:
        self._layers, self._optimizer = layers, optimizer
        self.value = value
        """The current λ."""
        self.proximal = proximal
        self.applied: bool | None = None
        """Whether λ was applied in this epoch; None if no step needed it as gradients."""
        self._suspended = self._has_warned = False
        if proximal:
            call_after_steps(optimizer, self._proximal_step)

    def begin_step(self, *, suspended: bool) -> None:
        """Begin a step; `suspended` if it trains dense weights without a penalty."""
        self._suspended = suspended
        if self._by_gradients and self.applied is None:
            self.applied = False

    def require_applied(self, epoch: int) -> None:
        """Raise TrainingError if the λ of an epoch was never applied."""
        if self.applied is False:
            raise TrainingError(
                f"penalty={self.value:g} was not applied in epoch {epoch}, so that no rank can "
                "become useless. Add train.penalty_loss() to the loss, call "
                "train.add_penalty_gradients() before optimizer.step(), or set proximal=True."
            )

    @property
    def _by_gradients(self) -> bool:
        return not self.proximal and self.value != 0.0 and not self._suspended

    def loss(self) -> Tensor:
        """Return λ times the group lasso; zero in proximal mode."""
        if self._by_gradients:
            self.applied = True
            return weighted_group_lasso(self._layers.values(), self.value)
        return next(iter(self._layers.values())).u.new_zeros(())

    def add_gradients(self, weight: float = 1.0) -> Tensor:
        """Add the gradients of `weight * loss()` to those of the factors, and return its value."""
        if self._by_gradients:
            self.applied = True
            return add_group_lasso_gradients(self._layers.values(), self.value, weight)
        return self.loss()

    def _proximal_step(self) -> None:
        """Do the proximal step of λ, at the learning rate of each parameter group.

        The optimizer's state of ranks that become zero is cleared.
        """
        if self.value == 0.0 or self._suspended:
            return
        rates = {
            id(p): float(group["lr"])
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        left = prox_layers_(
            {
                layer: (
                    rates.get(id(layer.u), 0.0) * self.value,
                    rates.get(id(layer.v), 0.0) * self.value,
                )
                for layer in self._layers.values()
            }
        )
        for layer, rank in left.items():
            if rank < layer.rank:
                clear_moments(layer, rank, self._optimizer)

    def warn_if_stalled(self, threshold: float | None, lost: Collection[str]) -> None:
        """Warn once if layers that lost no rank cannot reach the threshold at these rates."""
        if threshold is None or self._has_warned or not self._by_gradients:
            return
        watched = {name: layer for name, layer in self._layers.items() if name not in lost}
        stuck = stalled_above(watched, self._optimizer, self.value, threshold)
        if stuck:
            self._has_warned = True
            warnings.warn(
                f"at this learning rate {type(self._optimizer).__name__} keeps useless ranks at an "
                f"importance of about {max(stuck.values()):.0e}, above threshold={threshold:g}: "
                f"{listed(stuck)} will not shrink until it falls. Use proximal=True, or a larger "
                "threshold.",
                stacklevel=4,  # the caller of end_epoch
            )


def require_penalty(penalty: float) -> float:
    """Return λ; raise OptionError if it is not a number of at least 0."""
    try:
        return require_nonnegative("penalty", penalty)
    except OptionError as error:
        raise OptionError(
            f"{error} To reach a size, use Elastic(model, optimizer, sizes=[0.25])."
        ) from None
