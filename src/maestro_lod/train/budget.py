"""Land on a budget in one run: λ is steered until the model fits, then its weights heal.

The cost of the ranks that matter follows a plan, a straight line in its logarithm from where it
starts down to the budget. λ grows while the cost is above the plan and falls while it is below.
When the cost is close to the budget, or the plan has ended, the ranks that lose the least are
chosen within the budget, the others are set to zero, and training goes on without a penalty.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.cost import Ledger, by_factors, count_params
from maestro_lod.errors import OptionError, listed, nearest, require_whole
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.penalty import importance

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
class Budget:
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
    def of(
        cls, given: Mapping[str, float], model: nn.Module, ledger: Ledger, min_rank: int = 1
    ) -> Budget:
        """Check what a user gave: {"params" or "macs": share or count, "steps": optional count}."""
        if not isinstance(given, Mapping):
            raise OptionError(f'budget={given!r} is no mapping, such as {{"params": 0.2}}.')
        known = ("params", "macs", "steps")
        for key in given:
            if key not in known:
                raise OptionError(
                    f"budget has no {key!r}.{nearest(str(key), known)} It has {listed(known)}."
                )
        kinds = [kind for kind in ("params", "macs") if kind in given]
        if len(kinds) != 1:
            raise OptionError('budget needs either "params" or "macs", such as {"params": 0.2}.')
        kind, value = kinds[0], given[kinds[0]]
        dense = ledger.dense_params if kind == "params" else ledger.dense_macs
        if dense is None:
            raise OptionError("a budget of MACs needs an example of the input: LoD(…, example=x).")
        limit = _limit(kind, value, dense)
        costs = Costs.of(model, ledger, kind)
        smallest = costs.rest + sum(
            min(costs.layer(name, rank) for rank in choice)
            for name, choice in _choices(model, min_rank).items()
        )
        if limit < smallest:
            raise OptionError(
                f"{_said(kind, value)} is too small: rank {min_rank} in every layer that is "
                f"trained already needs {smallest:,}, a share of "
                f"{math.ceil(1e4 * smallest / dense) / 1e4}. Give at least that."
            )
        budget = cls(kind, limit, limit / dense, min_rank, None)
        if (steps := given.get("steps")) is not None:
            steps = require_whole("budget steps", steps)  # type: ignore[arg-type]
            if steps == 0:
                raise OptionError("budget steps=0 must be at least 1.")
            budget.plan(steps)
        return budget

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
        lasting, costs = lasting_ranks(model), Costs.of(model, ledger, self.kind)
        if costs.deployed(lasting) <= _CLOSE * self.limit:
            self.land(model, ledger)
            return
        behind = math.log(costs.factored(lasting) / self.limit)
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
        if self.phase in ("holding", "landed"):
            return
        self.phase, self.penalty = "holding", 0.0
        costs = Costs.of(model, ledger, self.kind)
        self.ranks = fitting_ranks(
            importance(model), _choices(model, self.min_rank), costs, self.limit
        )
        _clear(model, self.ranks)
        logger.info(
            "the model fits its budget: %.1f %% of %s=%d",
            100 * costs.deployed(self.ranks) / self.limit, self.kind, self.limit,
        )  # fmt: skip

    def end_epoch(self, model: nn.Module) -> dict[str, int]:
        """Return the ranks to cut to; make the plan if this was the first epoch."""
        if self.phase == "waiting":
            self.plan(max(1, self.epochs * self.step))
        elif self.phase == "pressing":
            return {name: choice[-1] for name, choice in _choices(model, self.min_rank).items()}
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


def _limit(kind: str, value: float, dense: int) -> int:
    """Turn a share of the dense model, up to 1, or a count above 1, into a count."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf or (value > 1 and value != round(value, 0)):
        raise OptionError(
            f"budget {kind}={value!r} must be a share of dense between 0 and 1, or a whole count."
        )
    limit = round(value * dense) if value <= 1 else int(value)
    if limit >= dense:
        raise OptionError(
            f"{_said(kind, value)} is not below the dense model's {dense:,}: nothing would have to "
            "shrink. Give a share below 1 or a smaller count."
        )
    return limit


def _said(kind: str, value: float) -> str:
    return f"budget {kind}={value}" if value <= 1 else f"budget {kind}={int(value):,}"


@dataclass(frozen=True)
class Costs:
    """What ranks cost, in params or MACs: Σ over layers, plus what is not low-rank."""

    per_rank: dict[str, int]
    dense: dict[str, int]
    break_even: dict[str, int]
    """The largest rank at which a layer is deployed factored."""
    rest: int

    @classmethod
    def of(cls, model: nn.Module, ledger: Ledger, kind: str) -> Costs:
        """Read the costs off a low-rank model."""
        layers = low_rank_layers(model)
        break_even = {name: layer.break_even for name, layer in layers.items()}
        if kind == "params":
            dense = {name: layer.dense_weights for name, layer in layers.items()}
            per_rank = {name: layer.weights(1) for name, layer in layers.items()}
            rest = count_params(model) - sum(layer.weights() for layer in layers.values())
            return cls(per_rank, dense, break_even, rest)
        assert ledger.dense_macs is not None
        per_rank, dense = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0)
        for name, parts in by_factors(model).items():
            if layers[name].has_factored_form:  # the others have the dense MACs at every rank
                for key, part in parts.items():
                    dense[name] += part.dense_macs(ledger.positions[key])
                    per_rank[name] += part.macs(ledger.positions[key], 1)
        return cls(per_rank, dense, break_even, ledger.dense_macs - sum(dense.values()))

    def factored(self, ranks: Mapping[str, int]) -> int:
        """Return the cost with every layer factored."""
        return self.rest + sum(self.per_rank[name] * rank for name, rank in ranks.items())

    def layer(self, name: str, rank: int) -> int:
        """Return the cost of one layer in the form that `fuse` and `extract` give it."""
        dense = rank > self.break_even[name]
        return self.dense[name] if dense else self.per_rank[name] * rank

    def deployed(self, ranks: Mapping[str, int]) -> int:
        """Return the cost with each layer in the form that `fuse` and `extract` give it."""
        return self.rest + sum(self.layer(name, rank) for name, rank in ranks.items())


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
    values: Mapping[str, Tensor], choices: Mapping[str, range], costs: Costs, limit: int
) -> dict[str, int]:
    """Return the ranks within the limit, and using nearly all of it, that lose the least.

    A layer keeps 1 - (importance of what goes / importance of all)², the model the product of that
    over its layers. All combinations are compared: layer by layer, the least loss is noted for
    every cost that can be reached.
    """
    room = limit - costs.rest
    grain = max(1, math.ceil(room / _GRAIN))
    places = room // grain + 1
    least = torch.full((places,), math.inf, device="cpu")
    least[0] = 0.0
    ways = []
    for name, choice in choices.items():
        tails = F.pad(values[name].double().cpu(), (0, 1))
        kept = 1 - (tails / tails[0].clamp(min=1e-300)).square()
        losses = -kept.clamp(min=1e-12).log()
        best = torch.full_like(least, math.inf)
        way = torch.zeros(places, dtype=torch.int64, device="cpu")
        for rank in choice:
            moved = math.ceil(costs.layer(name, rank) / grain)
            if moved < places:
                new = least[: places - moved] + float(losses[rank])
                better = new <= best[moved:]
                best[moved:][better] = new[better]
                way[moved:][better] = rank
        least = best
        ways.append(way)
    full = max(0, math.ceil((_FULL * limit - costs.rest) / grain))
    place = full + int(least[full:].argmin())
    if not least[place].isfinite():
        place = int(least.argmin())
    ranks: dict[str, int] = {}
    for name, way in zip(reversed([*choices]), reversed(ways), strict=True):
        ranks[name] = int(way[place])
        place -= math.ceil(costs.layer(name, ranks[name]) / grain)
    return ranks


@torch.no_grad()
def _clear(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Set all ranks beyond these to zero."""
    for name, layer in low_rank_layers(model).items():
        layer.u[:, ranks[name] :].zero_()
        layer.v[ranks[name] :].zero_()


def _typical_norm(model: nn.Module) -> float:
    """Return the median over layers of the mean norm of a rank of u."""
    norms = sorted(
        float(layer.u.detach().float().norm()) / math.sqrt(layer.rank)
        for layer in low_rank_layers(model).values()
        if layer.rank and layer.u.requires_grad
    )
    return norms[len(norms) // 2]
