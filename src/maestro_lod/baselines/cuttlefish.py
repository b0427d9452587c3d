"""Cuttlefish (Wang et al., MLSys 2023): chooses layers, time and ranks of a factorization itself.

The model trains dense until the stable ranks of its layers have converged. Then each layer is
factorized at its scaled stable rank, and the factors are trained with Frobenius decay. Layers that
would not become faster stay dense. The method determines the size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.baselines.factorized import Factorized, Factorizing
from maestro_lod.baselines.frobenius import FrobeniusDecay, low_rank_pairs
from maestro_lod.baselines.stable_rank import StableRanks, stable_rank
from maestro_lod.errors import OptionError
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.model.cost import Cost
from maestro_lod.model.surgery import decompose
from maestro_lod.model.survey import Plan
from maestro_lod.sizes.latency import latency
from maestro_lod.train.method import RunPlan, Settings, setting
from maestro_lod.train.size_settings import full_rank_costs

TRIAL = 0.25  # share of the full rank at which layers are profiled
# shares of the run and of the window: 15 and 11 epochs of 300
WINDOW, LAST = 1 / 20, 11 / 15


@dataclass(frozen=True)
class CuttlefishSettings(Factorizing, Settings):
    """Profiling of layers, convergence of stable ranks, and decay of the factors."""

    profile: str = setting("macs", "unit of the speedup", choices=("macs", "time"))
    speedup: float = setting(
        1.5, "least speedup at a quarter of the rank; other layers stay dense", least=0.0
    )
    window: int | None = setting(None, "epochs of the moving average; 1/20 of all if null", least=2)
    epsilon: float = setting(0.1, "slope of a stable rank that has converged", least=0.0)
    scaled: bool = setting(True, "scale stable ranks by their initial values")
    least_rank: float = setting(0.0, "least rank, as a share of the full rank", least=0.0)
    frobenius_decay: float | None = setting(
        None, "decay of the products of factors; null: the weight decay", least=0.0
    )

    def __post_init__(self) -> None:
        if self.decompose.ranks is not None:
            raise OptionError(
                "decompose.ranks is not used by cuttlefish, which chooses the ranks. Remove it."
            )
        if self.least_rank > 1.0:
            raise OptionError(f"least_rank={self.least_rank:g} must be a share, at most 1.")

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Cuttlefish:
        choice = self.choice(model)
        return Cuttlefish(
            model, optimizer, settings=self, choice=choice, example=example, dense=dense
        )


class Cuttlefish(Factorized):
    """Trains dense until stable ranks have converged, then trains factors."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, settings: CuttlefishSettings, **common: Any
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.settings = settings
        self.full = Plan(self.model, **self.choice).planned()
        self.scales: dict[str, float] = {}
        """Factor on the stable rank of each layer that will be factorized."""
        self.watched = StableRanks(2, 2, settings.epsilon)
        self._decay: FrobeniusDecay | None = None

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        window = self.settings.window or max(3, round(WINDOW * self.plan.epochs))
        self.watched.window, self.watched.last = window, max(2, round(LAST * window))
        if not self.scales:
            self.scales = dict.fromkeys(self._profiled(), 1.0)
            if self.settings.scaled:
                first = self._stable_ranks()
                self.scales = {name: self.full[name] / rank for name, rank in first.items()}

    def on_epoch_end(self, *, last: bool) -> None:
        if self.factorized or not self.scales:
            return
        now = self._stable_ranks()
        if self.watched.add(now):
            self.factorize({name: self._rank(name, rank) for name, rank in now.items()})

    def _rank(self, name: str, stable: int) -> int:
        full = self.full[name]
        least = math.ceil(self.settings.least_rank * full)
        return min(full, max(math.ceil(self.scales[name] * stable - 1e-9), least, 1))

    def _stable_ranks(self) -> dict[str, int]:
        dense = Plan(self.model, **self.choice).dense
        found = {}
        for name in self.scales:
            layer: Any = dense[name]
            kind: Any = low_rank_type(type(layer))
            found[name] = stable_rank(kind.from_dense_shape(layer, 0).to_matrices(layer.weight))
        return found

    def _profiled(self) -> list[str]:
        """Return the layers of all stacks that reach the speedup at a quarter of their ranks."""
        trial = {name: max(1, int(TRIAL * rank)) for name, rank in self.full.items()}
        if self.settings.profile == "time":
            low_rank = decompose(copy.deepcopy(self.model), **self.choice | {"ranks": trial})
            layers = latency(low_rank, self.example).layers
            costs = {
                name: (layers[name].seconds(rank, "dense"), layers[name].seconds(rank, "factored"))
                for name, rank in trial.items()
                if name in layers
            }
        else:
            counted, _ = full_rank_costs(self.model, self.example, self.choice)
            costs = {
                name: (
                    counted.layer(name, rank, "dense").macs or 0,
                    counted.layer(name, rank, "factored").macs or 0,
                )
                for name, rank in trial.items()
            }
        rows = Plan(self.model, **self.choice).rows
        return [*faster(costs, lambda name: rows[name].shape[0], self.settings.speedup)]

    def factorize(self, ranks: Mapping[str, int]) -> None:
        self.choice = self.choice | {"only": [*ranks], "skip": None}
        super().factorize(ranks)
        self._decay = self._frobenius()

    def reshape(self, state: dict[str, Any]) -> None:
        if state["ranks"]:
            self.choice = self.choice | {"only": [*state["ranks"]], "skip": None}
            super().reshape(state)
            self._decay = self._frobenius()

    def _frobenius(self) -> FrobeniusDecay:
        pairs = low_rank_pairs(self.model)
        return FrobeniusDecay(self.optimizer, pairs, self.settings.frobenius_decay)

    def after_backward(self, weight: float) -> None:
        if self._decay is not None:
            self._decay.add_gradients(weight)

    def state_dict(self) -> dict[str, Any]:
        watched = {"trace": self.watched.trace, "stable": self.watched.stable}
        return {**super().state_dict(), "scales": self.scales, **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.scales = dict(state["scales"])
        self.watched.trace = {name: [*values] for name, values in state["trace"].items()}
        self.watched.stable = [*state["stable"]]


def faster(
    costs: Mapping[str, tuple[float, float]], width: Callable[[str], int], speedup: float
) -> Iterable[str]:
    """Yield the layers of stacks that cost less than dense ÷ `speedup` when factorized.

    A stack is a sequence of layers with the same number of outputs, such as a stage of a ResNet.
    """
    stack: list[str] = []
    for name in [*costs, None]:
        if name is None or (stack and width(name) != width(stack[-1])):
            dense, factorized = (sum(costs[layer][i] for layer in stack) for i in (0, 1))
            if dense > speedup * factorized:
                yield from stack
            stack = []
        if name is not None:
            stack.append(name)
