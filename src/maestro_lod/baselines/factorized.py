"""Base classes of methods that train a dense model and then its low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.baselines.stages import Staged, exchange
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import low_rank_layers, ranks
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Example
from maestro_lod.model.structure import restructure, uninitialized
from maestro_lod.model.surgery import decompose
from maestro_lod.model.survey import Plan
from maestro_lod.train.lod_settings import Decomposition
from maestro_lod.train.method import setting


@dataclass(frozen=True)
class Factorizing:
    """Settings that choose the layers to factorize."""

    decompose: Decomposition = field(default_factory=Decomposition)
    keep_ends: bool = setting(True, "leave the first and the last layer dense")

    def choice(self, model: nn.Module) -> dict[str, Any]:
        """Return the arguments of `decompose` for a dense model, without ranks."""
        chosen = vars(self.decompose) | {"skip": self.decompose.skip or None, "ranks": None}
        layers = [*Plan(model, **chosen).planned()]
        if not layers[2 if self.keep_ends else 0 :]:
            ends = " other than the first and the last. Set keep_ends=false"
            raise OptionError(
                f"{type(model).__name__} has no layer to decompose"
                f"{ends if self.keep_ends else '. Set decompose.only or decompose.skip'}."
            )
        if self.keep_ends:
            chosen["skip"] = [*self.decompose.skip, layers[0], layers[-1]]
        return chosen


class Factorized(Staged):
    """Trains a dense model, and its factors after the factorization."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        choice: Mapping[str, Any],
        example: Example,
        dense: Cost,
    ) -> None:
        super().__init__(model, optimizer, example=example, dense=dense)
        self.choice = dict(choice)

    @property
    def factorized(self) -> bool:
        """True once the model is low-rank."""
        return bool(low_rank_layers(self.model))

    @property
    def stage(self) -> str:
        return "low-rank" if self.factorized else "dense"

    def factorize(self, ranks: Mapping[str, int]) -> None:
        """Replace layers by their leading singular directions and reset the optimizer."""
        chosen = self.choice | {"ranks": dict(ranks)}
        self._exchanged(lambda: decompose(self.model, **chosen))

    def reshape(self, state: dict[str, Any]) -> None:
        if state["ranks"]:
            plan = Plan(self.model, **self.choice | {"ranks": dict(state["ranks"])})
            self._exchanged(lambda: restructure(self.model, plan.structure(), fill=uninitialized))

    def _exchanged(self, change: Any) -> None:
        exchange(self.model, self.optimizer, change)
        self.ledger.measure(self.model, self.example)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ranks": ranks(self.model) if self.factorized else {}}
