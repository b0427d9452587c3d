"""Training for every size, or for one, as recipes choose it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost, cost_of
from maestro_lod.model.inputs import Example
from maestro_lod.model.surgery import decompose
from maestro_lod.sizes.measured_allocation import CostKind
from maestro_lod.train.budget import Budget
from maestro_lod.train.every_size import Elastic
from maestro_lod.train.lod_settings import _RANKS_ALONE, Decomposition
from maestro_lod.train.method import Builder, Settings, setting
from maestro_lod.train.size_settings import amount, build_narrower, require_share


@dataclass(frozen=True)
class ElasticSettings(Settings):
    """Settings of training for every size, or for a budget."""

    alternatives = ("budget", "smallest")

    decompose: Decomposition = Decomposition()  # noqa: RUF009
    budget: Budget | None = None
    smallest: float = setting(
        0.1, "the share of dense down to which every size is trained", check=require_share
    )
    size_cost: CostKind = setting("params", "what a size counts", choices=("params", "macs"))
    narrow: bool = setting(True, "begin narrower for a small budget, if there is a width")

    def build(self, builder: Builder, example: Example) -> nn.Module:
        budget = self.budget
        if budget is None or not self.narrow or builder.width is None:
            return super().build(builder, example)
        share = budget.value
        if share > 1:  # a count
            share /= amount(cost_of(builder(), example), budget.kind)
        if share >= _RANKS_ALONE[budget.kind]:
            return super().build(builder, example)
        try:
            return self.prepare(build_narrower(builder, example, math.sqrt(share), budget.kind))
        except OptionError as error:
            raise OptionError(f"{error}{budget.hint}") from error

    def prepare(self, model: nn.Module) -> nn.Module:
        return decompose(model, **vars(self.decompose) | {"skip": self.decompose.skip or None})

    @classmethod
    def at_size(cls, size: float) -> dict[str, Any]:
        return {"budget": {"params": size}}

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
