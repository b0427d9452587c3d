"""Train a model of a given size in one run.

A first part of the run trains the weights of the whole model, as dense training does. Then the
layers are factored, and those ranks are chosen that lose the least within the budget, over all
layers together. The others are removed, and the remaining ranks are trained further.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.shards import zero_behind_
from maestro_lod.errors import OptionError, listed, require_whole
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Example
from maestro_lod.sizes.allocation import allocation, frozen_layers, smallest_cost
from maestro_lod.sizes.rank_order import order_ranks
from maestro_lod.text import parse_size
from maestro_lod.train.gradient_scaling import scale_gradients
from maestro_lod.train.method import RunPlan, setting
from maestro_lod.train.progress import MethodRecord
from maestro_lod.train.rank_training import WARMUP, RankTraining
from maestro_lod.train.shrink import clear_moments
from maestro_lod.train.steps import Draw, call_after_steps, call_before_steps

logger = logging.getLogger(__name__)


def _amount(value: Any) -> Any:
    """Return an amount of a recipe as a number; it may be written such as 25% or 300k."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    if value is not None and not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    return parse_size(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Budget:
    """The limit of the deployed model in params or MACs: a share of dense, or a count.

    As recipes and `BudgetTraining` are given it; `steps` are those before the budget is applied.
    """

    kinds: ClassVar[tuple[str, ...]] = ("params", "macs")

    params: int | float | str | None = setting(
        None, "size to reach: 25%, 0.25, 300k", check=_amount
    )
    macs: int | float | str | None = setting(None, "the same of MACs", check=_amount)
    steps: int | None = setting(None, "until it is reached; 0.3 of the run")

    def __post_init__(self) -> None:
        if (self.params is None) == (self.macs is None):
            raise OptionError("a budget needs either params or macs, such as params=0.2.")
        given: Any = self._given
        if isinstance(given, str):
            given = parse_size(given, f"the budget's {self.kind}")
            object.__setattr__(self, self.kind, given)
        real = isinstance(given, numbers.Real) and not isinstance(given, bool)
        if not real or not 0 < given < math.inf or (given > 1 and given != round(given, 0)):
            raise OptionError(
                f"a budget of {self.kind}={given!r} must be a share of dense between 0 and 1, or a "
                "whole count."
            )
        if isinstance(given, float) and 1 < given <= 100:
            raise OptionError(
                f"a budget of {self.kind}={given} could be a percentage or a count: write "
                f"'{given:g}%' or {given:g}."
            )
        if self.steps is not None and require_whole("budget steps", self.steps) == 0:
            raise OptionError("budget steps=0 must be at least 1.")

    @property
    def kind(self) -> Literal["params", "macs"]:
        """The limited quantity: "params" or "macs"."""
        return "macs" if self.params is None else "params"

    @property
    def value(self) -> float:
        """The limit as a number: a share of dense up to 1, or a count."""
        assert self._given is not None and not isinstance(self._given, str)
        return self._given

    @property
    def _given(self) -> int | float | str | None:
        return self.macs if self.params is None else self.params

    @property
    def hint(self) -> str:
        """Return the end of an error about a count that was probably meant as a percentage."""
        percentage = 1 < self.value <= 100
        return f" Did you mean {self.kind}='{self.value:g}%'?" if percentage else ""

    def __str__(self) -> str:
        shown = self.value if self.value <= 1 else f"{int(self.value):,}"
        return f"a budget of {self.kind}={shown}"

    def limit(self, dense: int) -> int:
        """Return the limit as a count, given the cost of the dense model."""
        limit = round(self.value * dense) if self.value <= 1 else int(self.value)
        if limit >= dense:
            raise OptionError(
                f"{self} is not below the dense model's {dense:,}: nothing would have to shrink. "
                "Give a share below 1 or a smaller count."
            )
        return limit


def _too_small(
    budget: Budget, smallest: int, dense: int, min_rank: int, frozen: list[str]
) -> OptionError:
    needs = f"{smallest:,}, a share of {math.ceil(1e4 * smallest / dense) / 1e4}"
    if frozen:
        return OptionError(
            f"{budget} cannot be kept: frozen layers keep all their ranks ({listed(frozen)}), and "
            f"with rank {min_rank} in every other layer the model needs {needs}. Call "
            "requires_grad_(True) on them, or give at least that."
        )
    return OptionError(
        f"{budget} is too small: rank {min_rank} in every layer needs {needs}. Give at least that."
        f"{budget.hint}"
    )


@dataclass
class BudgetSchedule:
    """When a training applies its budget, and to which ranks."""

    kind: str
    limit: int
    share: float
    """The limit relative to the dense model."""
    min_rank: int
    steps: int | None
    """Optimizer steps that train the whole model; None where epochs are counted instead."""
    epochs: int = 1
    step: int = 0
    """Optimizer steps so far."""
    ranks: dict[str, int] = field(default_factory=dict)
    """The ranks that the model is cut to, once they are known."""
    phase: str = "whole"
    """whole → holding (applied, until the epoch ends) → landed (the ranks are removed)."""

    @property
    def applied(self) -> bool:
        """Whether the ranks are chosen."""
        return self.phase != "whole"

    def set_length(self, epochs: int, steps: int | None) -> None:
        """Plan for a run of this many epochs, of this many steps each if that is known."""
        if self.steps is None and steps is not None:
            self.steps = max(1, round(WARMUP * epochs * steps))
        self.epochs = max(1, round(WARMUP * epochs))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved schedule; the limit is that of the saved one."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])
        if self.phase not in ("holding", "landed"):
            self.phase = "whole"  # states of older versions have other names for it


class BudgetTraining(RankTraining):
    """Trains a decomposed model to a size that is given beforehand, in params or in MACs.

    >>> train = BudgetTraining(model, optimizer, params=0.25, steps=1000)
    >>> for epoch in range(epochs):
    ...     for x, y in loader:
    ...         with train.step():
    ...             F.cross_entropy(model(x), y).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     train.end_epoch()

    Without `steps`, `fit` applies the budget after three tenths of its run, and a loop of your own
    after its first epoch. The last epoch of a run applies it in any case.

    Args:
        model: A model with low-rank layers.
        optimizer: One optimizer that holds all trainable factors.
        params: The most params that the deployed model may have: a share of the dense model's, a
            count, or a text such as "25%" or "300k".
        macs: The same of its MACs; give either. It needs `example`.
        steps: Optimizer steps that train the whole model before the budget is applied.
        min_rank: The rank that no layer falls below; at least 1.
        ema: An averaged copy of the model that is cut together with it.
        example: An input of the model, on which MACs are counted.

    Raises:
        LayerError: The model has no low-rank layers, or parameters that cannot be trained.
        OptionError: An option is invalid, or no ranks keep the budget.
        TrainingError: The optimizer does not hold the factors, or cannot follow a shrink.
    """

    name: ClassVar[str] = "BudgetTraining"
    required_state: ClassVar[tuple[str, ...]] = (*RankTraining.required_state, "budget")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        params: float | str | None = None,
        macs: float | str | None = None,
        steps: int | None = None,
        min_rank: int = 1,
        ema: AveragedModel | None = None,
        example: Example | None = None,
    ) -> None:
        budget = Budget(params, macs, steps)
        min_rank = max(require_whole("min_rank", min_rank), 1)
        super().__init__(model, optimizer, min_rank=min_rank, ema=ema, example=example)
        self.schedule = self._planned(budget)
        self._begin(record_example=example is None)
        call_after_steps(self.optimizer, self._after_optimizer_step)
        if isinstance(self.optimizer, SGD):  # others go by the signs of gradients, not their size
            call_before_steps(self.optimizer, self._scale_gradients)

    def _planned(self, budget: Budget) -> BudgetSchedule:
        """Return the schedule of a budget; raise OptionError if no ranks can keep it."""
        ledger = self.ledger
        dense = ledger.dense_params if budget.kind == "params" else ledger.dense_macs
        if dense is None:
            raise OptionError("a budget of MACs needs an example of the input: give example=x.")
        limit = budget.limit(dense)
        costs = ledger.costs(self.model)
        smallest = smallest_cost(self.model, costs, budget.kind, self.min_rank)
        if limit < smallest:
            raise _too_small(budget, smallest, dense, self.min_rank, frozen_layers(self.model))
        return BudgetSchedule(budget.kind, limit, limit / dense, self.min_rank, budget.steps)

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        self.schedule.set_length(plan.epochs, plan.steps_per_epoch)

    def compare_with(self, dense: Cost) -> None:
        super().compare_with(dense)
        if whole := getattr(dense, self.schedule.kind):
            self.schedule.share = self.schedule.limit / whole

    # -- steps ---------------------------------------------------------------------------------

    def _prepare_step(self, passes: int) -> Draw | None:
        self._compare_processes(unfactored=not self.schedule.applied)
        return None

    def _after_optimizer_step(self) -> None:
        schedule = self.schedule
        schedule.step += 1
        if schedule.phase == "holding":
            self._clear_removed()
        elif schedule.phase == "whole" and schedule.step >= (schedule.steps or math.inf):
            self.apply_budget()

    def _scale_gradients(self) -> None:
        scale_gradients({self._layers[name]: rank for name, rank in self.schedule.ranks.items()})

    def apply_budget(self) -> None:
        """Order the ranks, choose those to keep, and set all others to zero until `end_epoch()`.

        Happens by itself after `steps`; call it where the length of a loop is not known
        beforehand, long before its end: what is left still has to be trained.
        """
        schedule = self.schedule
        if schedule.applied:
            return
        order_ranks(self.model, self.optimizer, self.ema)
        costs = self.ledger.costs(self.model)
        spent = allocation(
            self.model, costs, schedule.kind, most=schedule.limit, min_rank=schedule.min_rank
        )
        schedule.ranks, schedule.phase = spent.within(schedule.limit), "holding"
        self._clear_removed()
        cost = getattr(costs.at(schedule.ranks), schedule.kind)
        logger.info(
            "the model fits its budget: %.1f %% of %s=%d",
            100 * cost / schedule.limit, schedule.kind, schedule.limit,
        )  # fmt: skip

    @torch.no_grad()
    def _clear_removed(self) -> None:
        """Set ranks that will be removed to zero, and what the optimizer remembers of them."""
        for name, layer in self._layers.items():
            if (rank := self.schedule.ranks[name]) < layer.rank:
                u, v = layer.stored_factors()
                zero_behind_(u, 1, rank)
                zero_behind_(v, 0, rank)
                clear_moments(layer, rank, self.optimizer)

    # -- epochs, reports and state -------------------------------------------------------------

    def _ranks_to_keep(self, *, last: bool) -> dict[str, int] | None:
        schedule = self.schedule
        if last or (schedule.steps is None and self.epoch + 1 >= schedule.epochs):
            self.apply_budget()
        if schedule.phase != "holding":
            return None
        schedule.phase = "landed"
        return schedule.ranks

    def _options(self) -> str:
        schedule = self.schedule
        return f"{schedule.kind}={schedule.limit} min_rank={self.min_rank} steps={schedule.steps}"

    def record(self) -> MethodRecord:
        """Return the ranks of the model, its size as it would be deployed, and its budget."""
        return replace(super().record(), budget=self.schedule.share, phase=self.schedule.phase)

    def state_dict(self) -> dict[str, Any]:
        budget = {**vars(self.schedule), "ranks": dict(self.schedule.ranks)}
        return {**super().state_dict(), "budget": budget}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.schedule.load_state_dict(state["budget"])
