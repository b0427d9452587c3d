"""Land on a budget in one run: the whole model first, then no more of it than the budget allows.

A part of the run trains the weights of the whole model, as dense training does. Then they are
factored and those ranks that lose the least within the budget are chosen, over all layers together;
the others are removed, and what is left is trained as it is. Nothing is penalized or drawn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.shards import zero_behind_
from maestro_lod.errors import OptionError, listed
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Cost
from maestro_lod.sizes.allocation import allocation, frozen_layers, smallest_cost
from maestro_lod.sizes.rank_order import order_ranks
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.objective import Budget
from maestro_lod.train.shrink import clear_moments

logger = logging.getLogger(__name__)

WHOLE = 0.3
"""The share of a run that trains the whole model; in all runs that were tried better than 0.1."""


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
class Landing:
    """When and where one training lands within a limit on the params or MACs when deployed."""

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
    """What the model is cut to, once that is known."""
    phase: str = "whole"
    """whole → holding (until the epoch ends) → landed."""

    @classmethod
    def on(cls, budget: Budget, model: nn.Module, ledger: Ledger, min_rank: int = 1) -> Landing:
        """Return the plan of a landing, or refuse a budget that no ranks can keep."""
        dense = ledger.dense_params if budget.kind == "params" else ledger.dense_macs
        if dense is None:
            raise OptionError("a budget of MACs needs an example of the input: LoD(…, example=x).")
        limit = budget.limit(dense)
        smallest = smallest_cost(model, ledger.costs(model), budget.kind, min_rank)
        if limit < smallest:
            raise _too_small(budget, smallest, dense, min_rank, frozen_layers(model))
        return cls(budget.kind, limit, limit / dense, min_rank, budget.steps)

    def compare_with(self, dense: Cost) -> None:
        """Say the limit relative to this dense model."""
        if whole := getattr(dense, self.kind):
            self.share = self.limit / whole

    @property
    def landed(self) -> bool:
        """Whether the ranks are chosen."""
        return self.phase != "whole"

    def expect(self, epochs: int, steps: int | None) -> None:
        """Plan for a run of so many epochs, of so many steps each if that is known."""
        if self.steps is None and steps is not None:
            self.steps = max(1, round(WHOLE * epochs * steps))
        self.epochs = max(1, round(WHOLE * epochs))

    def after_step(
        self, model: nn.Module, ledger: Ledger, optimizer: Optimizer, ema: AveragedModel | None
    ) -> None:
        """Land if it is time, or keep ranks at zero that are still there after a landing."""
        self.step += 1
        if self.phase == "holding":
            self._clear(model, optimizer)
        elif self.phase == "whole" and self.steps is not None and self.step >= self.steps:
            self.land(model, ledger, optimizer, ema)

    def land(
        self,
        model: nn.Module,
        ledger: Ledger,
        optimizer: Optimizer,
        ema: AveragedModel | None,
    ) -> None:
        """Put ranks into order, choose those to keep and set all others to zero, in place."""
        if self.landed:
            return
        order_ranks(model, optimizer, ema)
        costs = ledger.costs(model)
        spent = allocation(model, costs, self.kind, most=self.limit, min_rank=self.min_rank)
        self.ranks, self.phase = spent.within(self.limit), "holding"
        self._clear(model, optimizer)
        logger.info(
            "the model fits its budget: %.1f %% of %s=%d",
            100 * getattr(costs.at(self.ranks), self.kind) / self.limit, self.kind, self.limit,
        )  # fmt: skip

    @torch.no_grad()
    def _clear(self, model: nn.Module, optimizer: Optimizer) -> None:
        for name, layer in low_rank_layers(model).items():
            if (rank := self.ranks[name]) < layer.rank:
                u, v = layer.stored_factors()
                zero_behind_(u, 1, rank)
                zero_behind_(v, 0, rank)
                clear_moments(layer, rank, optimizer)

    def due(self, epochs: int) -> bool:
        """Say whether it is time to land after so many epochs, where those are counted."""
        return self.steps is None and epochs >= self.epochs

    def end_epoch(self, model: nn.Module) -> dict[str, int]:
        """Return the ranks to cut the model to; those that it has while nothing is decided."""
        if self.phase == "holding":
            self.phase = "landed"
            return self.ranks
        return {name: layer.rank for name, layer in low_rank_layers(model).items()}

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "ranks": dict(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the limit is that of the saved one."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])
        if self.phase not in ("holding", "landed"):
            self.phase = "whole"  # an older state may say how far it was pressed
