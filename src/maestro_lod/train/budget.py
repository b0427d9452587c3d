"""Land on a budget in one run: λ is steered until the model fits, then its weights heal.

The cost of the ranks that matter follows a plan, a straight line in its logarithm from where it
starts down to the budget. λ grows while the cost is above the plan and falls while it is below.
When the cost is close to the budget, or the plan has ended, the ranks that lose the least are
chosen within the budget, the others are set to zero, and training goes on without a penalty.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.distributed.shards import whole_norm, zero_behind_
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.penalty import importance
from maestro_lod.train.strength import Budget

logger = logging.getLogger(__name__)

_LOOKS = 200  # how often λ is looked at on the way to the budget
_GAIN = 2.0  # log λ per unit of log cost above the plan
_PATIENCE = 20  # looks after which a cost that stays above the plan has raised log λ as much again
_NEGLIGIBLE = 0.05  # share of a layer's importance: ranks whose tail has no more hardly matter
_CLOSE = 1.08  # times the budget: from here on removing what is too much does no harm
_FULL = 0.95  # times the budget: how much of it the model should use
_EPOCHS = 8  # planned from the second epoch on, where nobody knows how many steps there will be
_GRAIN = 8192  # steps into which a budget is divided to choose ranks within it


@dataclass
class Steering:
    """Steers the λ of one training towards a limit on the params or MACs of the deployed model."""

    kind: str
    limit: int
    share: float
    """The limit relative to the dense model."""
    min_rank: int
    steps: int | None
    """Optimizer steps until the model fits; None until the first epoch tells."""
    epochs: int = _EPOCHS
    """How many epochs these steps are to fill, if the first epoch has to tell."""
    penalty: float = 0.0
    step: int = 0
    """Optimizer steps since the plan began, or while waiting for it."""
    pace: float = 0.0
    """The norm of a typical rank where the plan began, per planned step."""
    rates: float = 0.0
    """The sum of the learning rates since the plan began."""
    start: float | None = None
    """The logarithm of cost / limit where the plan began."""
    area: float = 0.0
    """The sum, over all looks, of how far the logarithm of the cost was above the plan."""
    spared: list[str] = field(default_factory=list)
    """Layers on their last rank, on which there is no pressure."""
    ranks: dict[str, int] = field(default_factory=dict)
    """What the model is cut to, once that is known."""
    phase: str = "waiting"
    """waiting (for the first epoch) → pressing → holding (until the epoch ends) → landed."""

    @classmethod
    def towards(
        cls, budget: Budget, model: nn.Module, ledger: Ledger, min_rank: int = 1
    ) -> Steering:
        """Return the steering at its start, or refuse a budget that no ranks can keep."""
        dense = ledger.dense_params if budget.kind == "params" else ledger.dense_macs
        if dense is None:
            raise OptionError("a budget of MACs needs an example of the input: LoD(…, example=x).")
        limit = budget.limit(dense)
        costs = ledger.costs(model)
        smallest = getattr(costs.rest, budget.kind) + sum(
            min(getattr(costs.layer(name, rank), budget.kind) for rank in choice)
            for name, choice in _choices(model, min_rank).items()
        )
        if limit < smallest:
            raise OptionError(
                f"{budget} is too small: rank {min_rank} in every layer that is trained already "
                f"needs {smallest:,}, a share of {math.ceil(1e4 * smallest / dense) / 1e4}. Give "
                "at least that."
            )
        steering = cls(budget.kind, limit, limit / dense, min_rank, None)
        if budget.steps is not None:
            steering.plan(int(budget.steps))
        return steering

    @property
    def healing(self) -> bool:
        """Whether the model fits its budget: every other step then trains it whole."""
        return self.phase in ("holding", "landed")

    def plan(self, steps: int) -> None:
        """Begin to press now, and fit after so many optimizer steps."""
        self.steps, self.step, self.phase = steps, 0, "pressing"

    def expect(self, epochs: int, steps: int | None) -> None:
        """Plan for half of a run of so many epochs, of so many steps each if that is known."""
        if self.phase != "waiting":
            return
        if steps is None:
            self.epochs = max(1, epochs // 2 - 1)
        else:
            self.plan(max(1, epochs * steps // 2))

    def after_step(self, model: nn.Module, ledger: Ledger, rate: float) -> None:
        """Look at what is alive from time to time and move λ; `rate` is the learning rate."""
        self.step += 1
        if self.phase == "holding":
            _clear(model, self.ranks)
        if self.phase != "pressing":
            return
        assert self.steps is not None
        self.rates += rate
        if self.step == 1 or self.step % max(1, self.steps // _LOOKS) == 0:
            self._look(model, ledger)
        if self.step == self.steps:
            self.land(model, ledger)

    def _look(self, model: nn.Module, ledger: Ledger) -> None:
        assert self.steps is not None
        lasting, costs = lasting_ranks(model), ledger.costs(model)
        if getattr(costs.at(lasting), self.kind) <= _CLOSE * self.limit:
            self.land(model, ledger)
            return
        as_factors = costs.at(lasting, dict.fromkeys(lasting, "factored"))
        behind = math.log(getattr(as_factors, self.kind) / self.limit)
        if self.start is None:
            self.start, self.pace = behind, _typical_norm(model) / self.steps
        above = behind - self.start * (1 - self.step / self.steps)
        above = max(-1.0, min(1.0, above))
        self.area += above
        pressure = self.pace * math.exp(_GAIN * (above + self.area / _PATIENCE))
        self.penalty = pressure * self.step / self.rates if self.rates else 0.0
        self.spared = [name for name, rank in lasting.items() if rank <= self.min_rank]

    def land(self, model: nn.Module, ledger: Ledger) -> None:
        """End the pressure: choose the ranks to keep and set all others to zero, in place."""
        if self.healing:
            return
        self.phase, self.penalty = "holding", 0.0
        costs, choices = ledger.costs(model), _choices(model, self.min_rank)
        self.ranks = fitting_ranks(
            importance(model),
            choices,
            lambda name, rank: getattr(costs.layer(name, rank), self.kind),
            limit=self.limit,
            rest=getattr(costs.rest, self.kind),
        )
        _clear(model, self.ranks)
        logger.info(
            "the model fits its budget: %.1f %% of %s=%d",
            100 * getattr(costs.at(self.ranks), self.kind) / self.limit, self.kind, self.limit,
        )  # fmt: skip

    def end_epoch(self, model: nn.Module, unmoved: Mapping[str, int]) -> dict[str, int]:
        """Return the ranks to cut to; make the plan if this was the first epoch.

        While the model is pressed, no layer is cut below its ranks that have not moved yet.
        """
        if self.phase == "waiting":
            self.plan(max(1, self.epochs * self.step))
        elif self.phase == "pressing":
            choices = _choices(model, self.min_rank)
            return {name: max(c[-1], unmoved.get(name, 0)) for name, c in choices.items()}
        elif self.phase == "holding":
            self.phase = "landed"
            return self.ranks
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "spared": list(self.spared), "ranks": dict(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the limit is that of the saved one."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])


def lasting_ranks(model: nn.Module) -> dict[str, int]:
    """Return how many ranks of each layer matter: the tail behind them is negligible."""
    return {
        name: int((values > _NEGLIGIBLE * values[:1]).sum())
        for name, values in importance(model).items()
    }


def _choices(model: nn.Module, min_rank: int) -> dict[str, range]:
    """Return the ranks that each layer can be cut to; one that is frozen keeps what it has."""
    choices = {}
    for name, values in importance(model).items():
        layer = low_rank_layers(model)[name]
        trained = layer.u.requires_grad or layer.v.requires_grad
        least = min(min_rank, layer.rank) if trained else layer.rank
        most = max(int((values > 0).sum()), least) if trained else layer.rank
        choices[name] = range(least, most + 1)
    return choices


def fitting_ranks(
    values: Mapping[str, Tensor],
    choices: Mapping[str, range],
    cost_of: Callable[[str, int], int],
    *,
    limit: int,
    rest: int = 0,
) -> dict[str, int]:
    """Return the ranks within the limit, and using nearly all of it, that lose the least.

    `cost_of(name, rank)` says what a layer costs, `rest` what is not low-rank. A layer keeps
    1 - (importance of what goes / importance of all)², the model the product of that over its
    layers. All combinations are compared: layer by layer, the least loss is noted for every cost
    that can be reached.
    """
    room = limit - rest
    grain = max(1, math.ceil(room / _GRAIN))
    places = room // grain + 1
    least = torch.full((places,), math.inf, device="cpu")
    least[0] = 0.0
    ways = []
    for name, choice in choices.items():
        losses = _losses(values[name])
        best = torch.full_like(least, math.inf)
        way = torch.zeros(places, dtype=torch.int64, device="cpu")
        for rank in choice:
            moved = math.ceil(cost_of(name, rank) / grain)
            if moved < places:
                new = least[: places - moved] + float(losses[rank])
                better = new <= best[moved:]
                best[moved:][better] = new[better]
                way[moved:][better] = rank
        least = best
        ways.append(way)
    place = _best_place(least, math.ceil((_FULL * limit - rest) / grain))
    ranks: dict[str, int] = {}
    for name, way in zip(reversed([*choices]), reversed(ways), strict=True):
        ranks[name] = int(way[place])
        place -= math.ceil(cost_of(name, ranks[name]) / grain)
    return ranks


def _losses(importance: Tensor) -> Tensor:
    """Return what a layer loses if it keeps 0, 1, … ranks, as a negative logarithm."""
    tails = F.pad(importance.double().cpu(), (0, 1))
    kept = 1 - (tails / tails[0].clamp(min=1e-300)).square()
    return -kept.clamp(min=1e-12).log()


def _best_place(least: Tensor, full: int) -> int:
    """Return the cost with the least loss, of those that use the budget if there is one."""
    full = max(0, full)
    place = full + int(least[full:].argmin())
    return place if bool(least[place].isfinite()) else int(least.argmin())


@torch.no_grad()
def _clear(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Set all ranks beyond these to zero."""
    for name, layer in low_rank_layers(model).items():
        u, v = layer.stored_factors()
        zero_behind_(u, 1, ranks[name])
        zero_behind_(v, 0, ranks[name])


def _typical_norm(model: nn.Module) -> float:
    """Return the median over layers of the mean norm of a rank of u."""
    norms = sorted(
        whole_norm(layer.stored_factors()[0]) / math.sqrt(layer.rank)
        for layer in low_rank_layers(model).values()
        if layer.rank and layer.u.requires_grad
    )
    return norms[len(norms) // 2]
