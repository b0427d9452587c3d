"""SVD of a dense model that was trained, and the search for the ranks that are needed least.

What one can do without any method: train, factorize, cut. The search is the one that low-rank
models are cut by too, so that only the factors differ. What is left may be trained on.
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
from maestro_lod.sizes.frontier_search import frontier
from maestro_lod.sizes.strategies import METHODS
from maestro_lod.train.method import setting
from maestro_lod.train.size_settings import (
    Measure,
    SizedSettings,
    full_rank_costs,
    ranks_within_size,
)


@dataclass(frozen=True)
class SVDSettings(Factorizing, SizedSettings):
    """A size, how to search for it, and how long to train on afterwards."""

    keep_ends: bool = setting(False, "the first and the last layer stay dense")
    size_in: Measure = setting("params", "what the size counts", choices=("params", "macs"))
    search: str = setting("look-ahead", "for the ranks to cut", choices=METHODS)
    finetune: float = setting(0.0, "share of the run after the cut", least=0.0)

    def __post_init__(self) -> None:
        if self.decompose.ranks is not None:
            raise OptionError("the search chooses the ranks: leave decompose.ranks out.")
        if self.finetune >= 1.0:
            raise OptionError(f"finetune={self.finetune:g} leaves no epoch to train before.")

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> SVD:
        choice = self.choice(model)
        costs, full = full_rank_costs(model, example, choice)
        ranks_within_size(
            costs, full, self.size, self.size_in
        )  # which refuses what cannot be reached
        return SVD(model, optimizer, settings=self, choice=choice, example=example, dense=dense)


class SVD(Factorized):
    """Cuts a trained model by a search, some epochs before the end or after the last one."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, settings: SVDSettings, **common: Any
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.settings = settings

    def turn(self, *, last: bool) -> None:
        dense = self.plan.epochs - epochs_of(self.settings.finetune, self.plan.epochs)
        if not self.factorized and (last or self.epoch >= dense):
            self.factorize(self._searched())

    def _searched(self) -> dict[str, int]:
        """Return the ranks that a search leaves of the size."""
        loss, chosen = self.plan.loss_of, self.settings
        if loss is None:
            raise TrainingError("svd has no training samples to search on.")
        low_rank = decompose(copy.deepcopy(self.model), **self.choice)
        found = frontier(
            low_rank, loss, method=chosen.search, cost=chosen.size_in, example=self.example,
            until=chosen.size,
        )  # fmt: skip
        return found.pick(**{f"max_{chosen.size_in}": chosen.size})
