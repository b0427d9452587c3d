"""The penalty on ranks in one training: its λ, as it was chosen, and how it is applied."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.errors import OptionError, TrainingError, listed
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.train.budget import Landing
from maestro_lod.train.floor import stalled_above
from maestro_lod.train.gradient_scaling import scale_gradients
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.method import RunPlan
from maestro_lod.train.objective import Budget, Pressure, Strength
from maestro_lod.train.optimizer_steps import call_after_steps, call_before_steps
from maestro_lod.train.penalty import add_group_lasso_gradients, weighted_group_lasso
from maestro_lod.train.pressure import penalty_for
from maestro_lod.train.proximal import press


class RankPenalty:
    """λ times the group lasso of a model: as a loss, as gradients, or as proximal steps.

    λ is constant or follows from a pressure and the length of training. Where there is a budget
    instead, it is zero, and ranks are removed by a landing.
    """

    def __init__(
        self,
        strength: Strength,
        model: nn.Module,
        optimizer: Optimizer,
        ledger: Ledger,
        *,
        ema: AveragedModel | None,
        proximal: bool,
        min_rank: int,
    ) -> None:
        self._model, self._optimizer, self._ledger, self._ema = model, optimizer, ledger, ema
        self._layers = require_low_rank(model)
        self.value = strength if isinstance(strength, float) else 0.0
        """λ as it is now."""
        self.landing: Landing | None = None
        if isinstance(strength, Budget):
            self.landing = Landing.on(strength, model, ledger, min_rank)
        self.proximal = proximal
        self._pressure = strength if isinstance(strength, Pressure) else None
        if self._pressure is not None and self._pressure.steps is not None:
            self._press_for(self._pressure, self._pressure.steps)
        self._warned_of_floor = self._rests = False
        self.use: str | None = None
        """Of λ in this epoch: None until a step has one, then "due" until it is "applied"."""
        if self.landing is not None:
            call_after_steps(optimizer, self._land_if_due)
            if isinstance(optimizer, SGD):  # others go by the signs of gradients, whatever the size
                call_before_steps(optimizer, self._scale_gradients)
        elif self.proximal:
            call_after_steps(optimizer, self._proximal_step)

    def start(self, plan: RunPlan) -> None:
        """Learn how long training lasts, where λ depends on it."""
        if self.landing is not None:
            self.landing.expect(plan.epochs, plan.steps_per_epoch)
        if self._pressure is not None and not self.value:
            if (steps := plan.rated_steps) is None:
                raise OptionError(
                    "a pressure needs to know how long training lasts, and the training data has "
                    f"no length: Pressure({self._pressure.value:g}, steps=…)."
                )
            self._press_for(self._pressure, steps)

    def _press_for(self, pressure: Pressure, steps: float) -> None:
        self.value = penalty_for(
            pressure.value, self._model, self._optimizer, steps, proximal=self.proximal
        )

    def begin_step(self, *, whole: bool) -> None:
        """Refuse a step while nobody has said how long training lasts and λ depends on it.

        A step that trains the whole model alone, as its weights, has no ranks to penalize.
        """
        self._rests = whole
        if self._pressure is not None and not self.value:
            raise OptionError(
                f"a pressure needs to know how long training lasts: Pressure("
                f"{self._pressure.value:g}, steps=epochs * len(loader)), or train with fit()."
            )
        if self._by_gradients and self.use is None:
            self.use = "due"

    def require_applied(self, epoch: int) -> None:
        """Refuse to end an epoch whose steps had a λ that nobody applied."""
        if self.use == "due":
            raise TrainingError(
                f"penalty={self.value:g} was not applied in epoch {epoch}: no rank would ever "
                "become useless. Add train.penalty_loss() to the loss, call "
                "train.add_penalty_gradients() before optimizer.step(), or set proximal=True."
            )

    @property
    def _by_gradients(self) -> bool:
        return not self.proximal and self.value != 0.0 and not self._rests

    def loss(self) -> Tensor:
        """Return λ times the group lasso; zero in proximal mode."""
        if self._by_gradients:
            self.use = "applied"
            return weighted_group_lasso(self._layers.values(), self.value)
        return next(iter(self._layers.values())).u.new_zeros(())

    def add_gradients(self, weight: float = 1.0) -> Tensor:
        """Add the gradients of `weight * loss()` to those of the factors, and return its value."""
        if self._by_gradients:
            self.use = "applied"
            return add_group_lasso_gradients(self._layers.values(), self.value, weight)
        return self.loss()

    def _proximal_step(self) -> None:
        if self.value != 0.0 and not self._rests:
            press(self._layers.values(), self.value, self._optimizer)

    def _land_if_due(self) -> None:
        assert self.landing is not None
        self.landing.after_step(self._model, self._ledger, self._optimizer, self._ema)

    def _scale_gradients(self) -> None:
        assert self.landing is not None
        used = self.landing.ranks
        scale_gradients({self._layers[name]: rank for name, rank in used.items()})

    def land(self) -> None:
        """Fit the budget now, whatever the plan."""
        if self.landing is None:
            raise OptionError("there is no budget to land on: LoD(…, penalty=Budget(params=0.2)).")
        self.landing.land(self._model, self._ledger, self._optimizer, self._ema)

    def warn_of_floor(self, threshold: float | None, lost: Collection[str]) -> None:
        """Warn once if layers that lost no rank cannot come down to the threshold as things are."""
        if threshold is None or self._warned_of_floor or not self._by_gradients:
            return
        watched = {name: layer for name, layer in self._layers.items() if name not in lost}
        stuck = stalled_above(watched, self._optimizer, self.value, threshold)
        if stuck:
            self._warned_of_floor = True
            warnings.warn(
                f"at this learning rate {type(self._optimizer).__name__} keeps useless ranks at an "
                f"importance of about {max(stuck.values()):.0e}, above threshold={threshold:g}: "
                f"{listed(stuck)} will not shrink until it falls. Use proximal=True, or a larger "
                "threshold.",
                stacklevel=3,  # whoever ends the epoch
            )
