"""SVD of a trained dense model, cut to a size by a frontier search.

The baseline without ordered ranks: train, factorize, cut. Low-rank models are cut by the same
search, so that only the factors differ. The cut model may be trained further.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.baselines.factorized import Factorized, Factorizing
from maestro_lod.baselines.stages import epochs_of
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.model.cost import Cost
from maestro_lod.model.surgery import decompose
from maestro_lod.sizes.frontier_search import METHODS, frontier
from maestro_lod.train.method import setting
from maestro_lod.train.size_settings import (
    Measure,
    SizedSettings,
    full_rank_costs,
    ranks_within_size,
)


@dataclass(frozen=True)
class SVDSettings(Factorizing, SizedSettings):
    """Size, its search, and the training after the cut."""

    keep_ends: bool = setting(False, "leave the first and the last layer dense")
    size_in: Measure = setting("params", "unit of the size", choices=("params", "macs"))
    search: str = setting("look-ahead", "search for the ranks to cut", choices=METHODS)
    finetune: float = setting(0.0, "share of the run after the cut", least=0.0)

    def __post_init__(self) -> None:
        if self.decompose.ranks is not None:
            raise OptionError(
                "decompose.ranks is not used by svd, whose search chooses the ranks. Remove it."
            )
        if self.finetune >= 1.0:
            raise OptionError(
                f"finetune={self.finetune:g} leaves no epoch before the cut. Set less than 1."
            )

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> SVD:
        choice = self.choice(model)
        costs, full = full_rank_costs(model, example, choice)
        # raises for a size that cannot be reached
        ranks_within_size(costs, full, self.size, self.size_in)
        return SVD(model, optimizer, settings=self, choice=choice, example=example, dense=dense)


class SVD(Factorized):
    """Cuts the model by a search after the last epoch, or some epochs before."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, settings: SVDSettings, **common: Any
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.settings = settings

    def on_epoch_end(self, *, last: bool) -> None:
        dense = self.plan.epochs - epochs_of(self.settings.finetune, self.plan.epochs)
        if not self.factorized and (last or self.epoch >= dense):
            self.factorize(self._searched())

    def _searched(self) -> dict[str, int]:
        """Return the ranks of the size that a search finds."""
        loss, chosen = self.plan.loss_of, self.settings
        if loss is None:
            raise TrainingError("svd needs training samples for its search, but got none.")
        low_rank = decompose(copy.deepcopy(self.model), **self.choice)
        found = frontier(
            low_rank, loss, method=chosen.search, cost=chosen.size_in, example=self.example,
            until=chosen.size,
        )  # fmt: skip
        return found.pick(**{f"max_{chosen.size_in}": chosen.size})
