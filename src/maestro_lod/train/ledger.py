"""The cost of training relative to training the dense model, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from maestro_lod.layers.ranks import low_rank_layers, ranks
from maestro_lod.layers.uses import FactorUser, factor_uses
from maestro_lod.model.cost import Cost, Costs, count_bits, count_params
from maestro_lod.model.inputs import Example
from maestro_lod.model.macs import DenseMacs, dense_macs


@dataclass(frozen=True)
class EpochCost:
    """The ranks of an epoch, and the cost of its steps."""

    ranks: dict[str, int]
    params: int
    """Parameters held in memory."""
    macs: float | None
    """Expected forward MACs of a sampled step, by the paper's convention: always factored."""
    executed_macs: float | None
    """Expected executed forward MACs: each layer factored or composed, as it chose."""


@dataclass
class Ledger:
    """The cost of training relative to training the dense model, epoch by epoch.

    Counted as in the paper: parameters in memory at the current ranks, and expected forward MACs of
    the sampled network; the backward multiplies both sides by the same factor. MACs are None until
    an example of the model's input is known.
    """

    dense_params: int
    dense_macs: int | None = None
    positions: dict[str, int] = field(default_factory=dict)
    """The number of positions of the example to which each low-rank layer applies its weight."""
    epochs: list[EpochCost] = field(default_factory=list)
    other_dense: tuple[int, int | None] | None = None
    """Params and MACs of another dense model that costs are relative to, if there is one."""

    @classmethod
    def open_for(cls, model: nn.Module, example: Example | None = None) -> Ledger:
        """Return an empty ledger for a low-rank model."""
        layers = low_rank_layers(model)
        factored = sum(layer.weights() - layer.dense_weights for layer in layers.values())
        ledger = cls(dense_params=count_params(model) - factored)
        if example is not None:
            ledger.measure(model, example)
        return ledger

    @property
    def reference(self) -> tuple[int, int | None]:
        """Params and MACs of the dense model that costs are relative to."""
        return self.other_dense or (self.dense_params, self.dense_macs)

    def measure(self, model: nn.Module, example: Example) -> None:
        """Count MACs and positions on an example of the model's input."""
        macs = dense_macs(model, example)
        self.dense_macs, self.positions = macs.total, macs.positions

    def epoch_cost(
        self, model: nn.Module, chances: Mapping[str, Sequence[float]], *, full_pass: float = 0.0
    ) -> EpochCost:
        """Return the cost of an epoch at the model's current ranks, to be appended to `epochs`.

        Args:
            model: The low-rank model.
            chances: The probability of each layer to be at rank 1, 2, … in a step; the others are
                always at their stored rank.
            full_pass: The share of steps with an additional pass at full rank.
        """
        layers = low_rank_layers(model)
        return EpochCost(
            ranks={name: layer.rank for name, layer in layers.items()},
            params=count_params(model),
            macs=self._expected(model, chances, full_pass, lambda m, p, r: m.macs(p, r)),
            executed_macs=self._expected(
                model, chances, full_pass, lambda m, p, r: m.executed_macs(p, r)
            ),
        )

    def costs(self, model: nn.Module) -> Costs:
        """Return the costs of the deployed model at any ranks."""
        macs = self.dense_macs
        return Costs(model, None if macs is None else DenseMacs(macs, {}, self.positions))

    def deployed(self, model: nn.Module) -> Cost:
        """Return the cost of the extracted model at its current ranks."""
        return self.costs(model).at(ranks(model))

    def sizes(self, model: nn.Module) -> dict[str, Any]:
        """Return the size and cost of the deployed model, by the names of `MethodRecord`."""
        deployed = self.deployed(model)
        dense_params, dense_macs = self.reference
        share, macs = deployed.params / dense_params, deployed.macs
        macs_share = None if macs is None or not dense_macs else macs / dense_macs
        return {
            "params": deployed.params,
            "macs": macs,
            "relative_params": share,
            "relative_macs": macs_share,
            "bits": count_bits(model, deployed.params),
            "relative_bits": share,
        }

    def _expected(
        self,
        model: nn.Module,
        chances: Mapping[str, Sequence[float]],
        full_pass: float,
        macs: Callable[[FactorUser, int, int], int],
    ) -> float | None:
        if self.dense_macs is None:
            return None
        layers = low_rank_layers(model)
        sampled = full = float(self.dense_macs)
        for use in factor_uses(model):  # a shared head has the rank of its embedding
            layer, positions = use.costs, self.positions[use.name]
            whole = macs(layer, positions, layer.rank)
            if layers[use.owner].identity_factor is not None:  # trained as a dense weight
                whole = layer.dense_macs(positions)
            full += whole - layer.dense_macs(positions)
            sampled += whole - layer.dense_macs(positions)
            for b, chance in enumerate(chances.get(use.owner, ()), 1):
                sampled += chance * (macs(layer, positions, b) - whole)
        return sampled + full_pass * full

    @property
    def relative_params(self) -> float | None:
        """Mean parameters in memory over the epochs so far, relative to dense training."""
        return self._mean([epoch.params for epoch in self.epochs], self.reference[0])

    @property
    def relative_macs(self) -> float | None:
        """Mean MACs per step over the epochs so far, relative to dense training."""
        return self._mean([epoch.macs for epoch in self.epochs], self.reference[1])

    @property
    def relative_executed_macs(self) -> float | None:
        """Mean executed MACs per step over the epochs so far, relative to dense training."""
        return self._mean([epoch.executed_macs for epoch in self.epochs], self.reference[1])

    def relative(self) -> dict[str, float | None]:
        """Return all costs so far, relative to dense training, by name."""
        kinds = ("relative_params", "relative_macs", "relative_executed_macs")
        return {kind: getattr(self, kind) for kind in kinds}

    @staticmethod
    def _mean(costs: list[int] | list[float | None], dense: int | None) -> float | None:
        counted = [cost for cost in costs if cost is not None]
        if not dense or not counted or len(counted) < len(costs):
            return None
        return sum(counted) / len(counted) / dense

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ledger."""
        self.dense_params, self.dense_macs = state["dense_params"], state["dense_macs"]
        self.positions = dict(state["positions"])
        self.epochs = [EpochCost(**epoch) for epoch in state["epochs"]]
        other = state.get("other_dense", state.get("beside"))  # its name in older states, if any
        self.other_dense = None if other is None else (other[0], other[1])
