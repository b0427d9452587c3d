"""What methods share that train a dense model first and low-rank factors of it afterwards."""

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
    """Which layers become low-rank; a part of settings."""

    decompose: Decomposition = field(default_factory=Decomposition)
    keep_ends: bool = setting(True, "the first and the last layer stay dense")

    def choice(self, model: nn.Module) -> dict[str, Any]:
        """Return what `decompose` takes, without ranks, for a dense model."""
        chosen = vars(self.decompose) | {"skip": self.decompose.skip or None, "ranks": None}
        layers = [*Plan(model, **chosen).wanted()]
        if not layers[2 if self.keep_ends else 0 :]:
            ends = " beside the first and the last (keep_ends=false decomposes them too)"
            raise OptionError(
                f"no layer of {type(model).__name__} can be decomposed as asked"
                f"{ends if self.keep_ends else ''}."
            )
        if self.keep_ends:
            chosen["skip"] = [*self.decompose.skip, layers[0], layers[-1]]
        return chosen


class Factorized(Staged):
    """Trains a dense model until it is factorized, and then its factors."""

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
        """Whether the model is low-rank by now."""
        return bool(low_rank_layers(self.model))

    @property
    def stage(self) -> str:
        return "low-rank" if self.factorized else "dense"

    def factorize(self, ranks: Mapping[str, int]) -> None:
        """Replace layers by their leading singular directions; the optimizer starts anew."""
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
