"""Pufferfish (Wang et al., MLSys 2021): a dense warm-up, then factors of fixed ranks.

After the warm-up, every chosen layer is replaced by its leading singular directions, at a share of
its full rank. The optimizer is reset, without momentum; the schedule of the learning rate stays
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.baselines.factorized import Factorized, Factorizing
from maestro_lod.baselines.stages import epochs_of
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost
from maestro_lod.model.survey import Plan
from maestro_lod.train.method import RunPlan, Settings, setting
from maestro_lod.train.size_settings import (
    Measure,
    full_rank_costs,
    ranks_within_size,
    require_share,
)

QUARTER = 0.25  # share of the full rank, the paper's choice for all its models


def _optional_share(value: Any) -> Any:
    return None if value is None else require_share(value)


@dataclass(frozen=True)
class PufferfishSettings(Factorizing, Settings):
    """Size or ranks; by default a quarter of each full rank."""

    alternatives = ("size",)

    size: float | None = setting(None, "share of the dense model to reach", check=_optional_share)
    size_in: Measure = setting("params", "unit of the size", choices=("params", "macs"))
    warmup: float = setting(0.25, "share of the run that trains the dense model", least=0.0)

    def __post_init__(self) -> None:
        if self.size is not None and self.decompose.ranks is not None:
            raise OptionError(
                "size and decompose.ranks are both set, but size determines the ranks. Remove one "
                "of them."
            )
        if self.warmup >= 1.0:
            raise OptionError(
                f"warmup={self.warmup:g} leaves no epoch to train the factors. Set less than 1."
            )

    @classmethod
    def at_size(cls, size: float) -> dict[str, Any]:
        return {"size": size}

    def ranks(self, model: nn.Module, example: Any) -> dict[str, int]:
        """Return the rank of each layer of a dense model to factorize."""
        choice = self.choice(model)
        if self.size is not None:
            costs, full = full_rank_costs(model, example, choice)
            return ranks_within_size(costs, full, self.size, self.size_in)
        given = self.decompose.ranks
        return Plan(model, **choice | {"ranks": QUARTER if given is None else given}).planned()

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Pufferfish:
        return Pufferfish(
            model, optimizer, ranks=self.ranks(model, example), warmup=self.warmup,
            choice=self.choice(model), example=example, dense=dense,
        )  # fmt: skip


class Pufferfish(Factorized):
    """Factorizes the model once, after the warm-up."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        ranks: Mapping[str, int],
        warmup: float,
        **common: Any,
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.ranks, self.warmup = dict(ranks), warmup

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        if self._due():
            self.factorize(self.ranks)

    def on_epoch_end(self, *, last: bool) -> None:
        if self._due() or (last and not self.factorized):
            self.factorize(self.ranks)

    def _due(self) -> bool:
        return not self.factorized and self.epoch >= epochs_of(self.warmup, self.plan.epochs)
