"""Training for every size, or for one, as recipes choose it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.model.cost import Cost
from maestro_lod.sizes.measured_allocation import CostKind
from maestro_lod.train.budget import Budget
from maestro_lod.train.every_size import Elastic
from maestro_lod.train.lod_settings import BudgetedSettings, Decomposition
from maestro_lod.train.method import setting
from maestro_lod.train.size_settings import amount, require_share


@dataclass(frozen=True)
class ElasticSettings(BudgetedSettings):
    """Settings of training for every size, or for a budget."""

    alternatives = ("budget", "smallest")

    decompose: Decomposition = Decomposition()  # noqa: RUF009
    budget: Budget | None = None
    smallest: float = setting(
        0.1, "the share of dense down to which every size is trained", check=require_share
    )
    size_cost: CostKind = setting("params", "what a size counts", choices=("params", "macs"))
    narrow: bool = setting(True, "begin narrower for a small budget, if there is a width")

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Elastic:
        sizes: dict[str, Any] = {"smallest": self.smallest, "cost": self.size_cost}
        if self.budget is not None:  # of the recipe's model, which may be wider
            kind = self.budget.kind
            sizes = {"sizes": [self.budget.limit(amount(dense, kind))], "cost": kind}
        train = Elastic(model, optimizer, seed=seed, example=example, **sizes)
        train.compare_with(dense)
        return train
