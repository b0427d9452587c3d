"""Every size from one training: submodels drawn by what they cost, all layers cut together.

First the whole model is trained alone. Then its ranks are put into order, and from there on every
step trains the whole model and, taught by it, a submodel. Sizes are rungs of a ladder, evenly
spaced in the logarithm of the cost, so that small ones are trained as often as large ones; which
layers keep how many ranks on a rung is decided anew after every epoch, by the weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.errors import OptionError, require_nonnegative, require_whole
from maestro_lod.model.cost import Costs
from maestro_lod.sizes.allocation import allocation, smallest_cost
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.sampling import ALONE, RankSampler
from maestro_lod.train.zero_ranks import much_is_unmoved

_RUNGS = 32  # sizes on a ladder, the whole model not among them
_NEAR = 3  # each layer is cut as on one of so many rungs to either side: a search has a choice then
_WORTH = 0.7  # of the dense cost: a kind of cost that ranks do not bring below this has no ladder


@dataclass(frozen=True)
class Elastic:
    """Train every size down to a share of the dense model, in params and in MACs.

    >>> train = LoD(model, optimizer, sampling=Elastic(0.1))

    The first `alone` epochs train the whole model alone. Without a number `fit` takes three tenths
    of its run, and a loop of your own the first epoch; 0 is for models that are trained already.
    """

    least: float = 0.1
    alone: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < require_nonnegative("elastic", self.least) < 1.0:
            raise OptionError(
                f"elastic={self.least!r} must be a share of the dense model between 0 and 1, such "
                "as 0.1: the smallest size to train."
            )
        if self.alone is not None:
            require_whole("alone", self.alone)


class ElasticSampler(RankSampler):
    """Draws submodels of any size; none while the whole model is trained alone."""

    def __init__(self, model: nn.Module, elastic: Elastic, *, seed: int = 0) -> None:
        super().__init__(model, seed=seed)
        self.strategy = "elastic"
        self.elastic = elastic
        self.alone = 1 if elastic.alone is None else elastic.alone
        self._ladders: list[list[list[int]]] = []  # kind of cost -> rung -> rank of each layer

    def expect(self, epochs: int) -> None:
        """Plan for a run of so many epochs."""
        if self.elastic.alone is None:
            self.alone = round(ALONE * epochs)

    def waits(self, epoch: int, ledger: Ledger) -> bool:
        """Say whether the whole model is still trained alone; if not, there are sizes to draw."""
        if super().waits(epoch, ledger):
            return True
        if not self._ladders:
            self.build(ledger.costs(self._model))
        return False

    def end_epoch(
        self, epochs: int, ledger: Ledger, optimizer: Optimizer, ema: AveragedModel | None
    ) -> None:
        """After so many epochs: order ranks once those alone are over, and choose sizes anew."""
        super().end_epoch(epochs, ledger, optimizer, ema)
        if epochs >= self.alone:
            self.build(ledger.costs(self._model))

    def build(self, costs: Costs) -> None:
        """Decide anew which layers keep how many ranks on each rung."""
        kinds = ("params",) if costs.dense.macs is None else ("params", "macs")
        ladders = {kind: self._ladder(costs, kind) for kind in kinds}
        self._names = list(self._layers)
        self._ladders = [ladder for ladder in ladders.values() if ladder] or [
            [[layer.rank for layer in self._layers.values()]] * _RUNGS  # nothing saves any cost
        ]

    def _ladder(self, costs: Costs, kind: str) -> list[list[int]]:
        dense = int(getattr(costs.dense, kind))
        here = {name: layer.rank for name, layer in self._layers.items()}
        top = min(dense, int(getattr(costs.at(here), kind)))
        smallest = smallest_cost(self._model, costs, kind)
        bottom = max(self.elastic.least * dense, smallest)
        if smallest > _WORTH * dense or bottom >= top:
            return []
        spent = allocation(self._model, costs, kind, most=top)
        limits = [round(top * (bottom / top) ** (i / _RUNGS)) for i in range(1, _RUNGS + 1)]
        return [[*spent.within(limit).values()] for limit in limits]

    def sample(self) -> dict[str, int]:
        """Draw a size, and for each layer a rung near it."""
        ranks = self._require_ranks()
        ladder = self._ladders[self._draw(len(self._ladders))]
        rung = self._draw(_RUNGS)
        drawn = {}
        for index, name in enumerate(self._names):
            near = rung + self._draw(2 * _NEAR + 1) - _NEAR
            if name in ranks:
                drawn[name] = max(1, ladder[min(max(near, 0), _RUNGS - 1)][index])
        return drawn

    def chances(self) -> dict[str, list[float]]:
        """Return how likely a draw leaves each layer at rank 1, 2, … of those that it has."""
        ranks = self.live_ranks()
        chances = {name: [0.0] * rank for name, rank in ranks.items()}
        rungs = [*_near_rungs()]
        share = 1 / (len(self._ladders) * len(rungs)) if self._ladders else 0.0
        for ladder in self._ladders:
            for index, name in enumerate(self._names):
                for rung in rungs if name in ranks else ():
                    chances[name][max(1, ladder[rung][index]) - 1] += share
        return chances

    def fingerprint(self) -> str:
        """Return a short text that is the same where all draws to come are."""
        return f"{super().fingerprint()}-{zlib.crc32(repr(self._ladders).encode()):08x}"

    def state_dict(self) -> dict[str, Any]:
        """Return all state as tensors, strings and lists."""
        ladders = torch.tensor(self._ladders, dtype=torch.int64, device="cpu")
        return {**super().state_dict(), "ladders": ladders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly; the next draw is the one that would have come next."""
        alone = self.alone
        super().load_state_dict(state)
        self.alone = state.get("alone", alone)  # older states do not say
        ladders: Tensor = state["ladders"]
        self._ladders = ladders.tolist()


def sampler_for(
    model: nn.Module, sampling: str | Elastic, seed: int, *, budget: bool
) -> RankSampler:
    """Return what draws the ranks of a model's steps; with a budget nothing will be drawn.

    Where a layer begins mostly as zeros, the whole model is trained alone first, as elastic
    training does: layers before one of zeros get next to no gradients until it has grown, and what
    sampling does to them meanwhile drowns the little that there is.
    """
    if isinstance(sampling, Elastic):
        return ElasticSampler(model, sampling, seed=seed)
    sampler = RankSampler(model, strategy=sampling, seed=seed)
    sampler.alone = int(not budget and much_is_unmoved(model))
    return sampler


def _near_rungs() -> Iterator[int]:
    """Go through all rungs that a layer may get, as often as draws lead to them."""
    for rung in range(_RUNGS):
        for near in range(rung - _NEAR, rung + _NEAR + 1):
            yield min(max(near, 0), _RUNGS - 1)
