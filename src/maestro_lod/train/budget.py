"""Land on a budget in one run: λ is steered until the model fits, then its weights heal.

The cost of what is still alive follows a plan, a straight line in its logarithm from where it
starts to the budget. λ grows while the cost is above the plan and falls while it is below. Close to
the budget λ becomes zero; at the end of that epoch the few ranks too many, the least important
ones, are removed, and training goes on without a penalty.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maestro_lod.cost import Ledger, costed_layers, count_params
from maestro_lod.errors import OptionError, listed, require_whole
from maestro_lod.layers.embedding import SharedHead
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.penalty import importance

logger = logging.getLogger(__name__)

_LOOKS = 200  # how often λ is looked at on the way to the budget
_GAIN = 0.05  # by how much log λ moves per look, per unit of log cost above the plan
_DAMPING = 2.0  # and by how much per unit that log cost moved away from the plan since last look
_NEGLIGIBLE = 0.05  # share of a layer's importance: a tail with less is as good as gone
_CLOSE = 1.08  # times the budget: here the pressure ends and removing the rest does no harm
_FULL = 0.95  # times the budget: how much of it the model should use
_PATIENCE = 1.5  # times the planned steps: after that the budget is enforced as it is
_EPOCHS = 8  # planned from the second epoch on, where nobody said how many steps


@dataclass
class Budget:
    """Steers the λ of one training towards a limit on params or MACs."""

    kind: str
    limit: int
    """Of the deployed model, each layer dense or factored, whichever is cheaper."""
    steps: int | None
    """Optimizer steps until the model should fit; None until the first epoch tells."""
    penalty: float = 0.0
    step: int = 0
    """Optimizer steps since the plan began."""
    start: float | None = None
    """The logarithm of cost / limit where the plan began."""
    above: float | None = None
    """How far the logarithm of the cost was above the plan at the last look."""
    trend: float = 0.0
    """How it moved per look, smoothed."""
    phase: str = "waiting"
    """waiting (for the first epoch) → pressing → holding (until the epoch ends) → landed."""

    @classmethod
    def of(cls, given: Mapping[str, float], model: nn.Module, ledger: Ledger) -> Budget:
        """Check what a user gave: {"params" or "macs": share or count, "steps": optional count}."""
        known = {"params", "macs", "steps"}
        if unknown := sorted(set(given) - known):
            raise OptionError(f"budget has no {listed(unknown)}; it has {listed(sorted(known))}.")
        kinds = [kind for kind in ("params", "macs") if kind in given]
        if len(kinds) != 1:
            raise OptionError('budget needs one of "params" and "macs", such as {"params": 0.2}.')
        kind, value = kinds[0], given[kinds[0]]
        if kind == "macs" and ledger.dense_macs is None:
            raise OptionError("a budget of MACs needs an example of the input: LoD(…, example=x).")
        dense = ledger.dense_params if kind == "params" else ledger.dense_macs
        assert dense is not None
        limit = _limit(kind, value, dense)
        costs = Costs.of(model, ledger, kind)
        smallest = costs.deployed(dict.fromkeys(costs.per_rank, 1))
        if limit < smallest:
            raise OptionError(
                f"budget {kind}={value} is {limit:,}, but rank 1 in every layer already needs "
                f"{smallest:,} ({smallest / dense:.3f}× dense). Give at least that."
            )
        steps = given.get("steps")
        if steps is not None and require_whole("budget steps", steps) == 0:  # type: ignore[arg-type]
            raise OptionError("budget steps=0 must be at least 1.")
        waiting = "waiting" if steps is None else "pressing"
        return cls(kind, limit, None if steps is None else int(steps), phase=waiting)

    @property
    def landed(self) -> bool:
        return self.phase == "landed"

    def after_step(self, model: nn.Module, ledger: Ledger) -> None:
        """Look at the cost of what is alive from time to time, and move λ."""
        if self.phase != "pressing":
            return
        assert self.steps is not None
        if self.step == 0:
            self.penalty = 0.01 * _typical_gradient(model)
        self.step += 1
        if self.step % max(1, self.steps // _LOOKS):
            return
        alive, costs = lasting_ranks(model), Costs.of(model, ledger, self.kind)
        if costs.deployed(alive) <= _CLOSE * self.limit or self.step > _PATIENCE * self.steps:
            self.phase, self.penalty = "holding", 0.0
            return
        behind = math.log(costs.factored(alive) / self.limit)
        if self.start is None:
            self.start = behind
        above = behind - self.start * max(0.0, 1 - self.step / self.steps)
        moved = 0.0 if self.above is None else above - self.above
        self.trend = 0.8 * self.trend + 0.2 * moved
        self.above = above
        self.penalty *= math.exp(_GAIN * max(-2.0, min(2.0, above)) + _DAMPING * self.trend)

    def end_epoch(self, model: nn.Module, ledger: Ledger, steps: int) -> dict[str, int] | None:
        """Return the ranks to cut to if the model lands here; plan if the first epoch has ended."""
        if self.phase == "waiting":
            self.steps, self.phase = _EPOCHS * steps, "pressing"
        if self.phase != "holding":
            return None
        self.phase = "landed"
        costs = Costs.of(model, ledger, self.kind)
        ranks = fitting_ranks(importance(model), alive_ranks(model), costs, self.limit)
        share = costs.deployed(ranks) / self.limit
        logger.info(
            "the model fits its budget: %.1f %% of %s=%d", 100 * share, self.kind, self.limit
        )
        return ranks

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the limit is that of the saved one."""
        for key, value in state.items():
            setattr(self, key, value)


def _limit(kind: str, value: float, dense: int) -> int:
    """Turn a share of the dense model, or a count, into a count."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise OptionError(f"budget {kind}={value!r} must be a share of dense in (0, 1) or a count.")
    limit = round(value * dense) if isinstance(value, float) and value < 1.0 else int(value)
    if limit >= dense:
        raise OptionError(
            f"budget {kind}={value} is {limit:,}, not below the dense model's {dense:,}: nothing "
            "would have to shrink. Give a share in (0, 1) or a smaller count."
        )
    return limit


@dataclass(frozen=True)
class Costs:
    """What ranks cost, in params or MACs: Σ over layers, plus what is not low-rank."""

    per_rank: dict[str, int]
    dense: dict[str, int]
    rest: int

    @classmethod
    def of(cls, model: nn.Module, ledger: Ledger, kind: str) -> Costs:
        """Read the costs off a low-rank model."""
        layers = low_rank_layers(model)
        if kind == "params":
            dense = {name: layer.dense_weights for name, layer in layers.items()}
            per_rank = {name: layer.weights(1) for name, layer in layers.items()}
            rest = count_params(model) - sum(layer.weights() for layer in layers.values())
            return cls(per_rank, dense, rest)
        assert ledger.dense_macs is not None
        name_of = {id(layer): name for name, layer in layers.items()}
        per_rank, dense = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0)
        for name, layer in costed_layers(model).items():
            owner: LowRank = layer.embedding if isinstance(layer, SharedHead) else layer
            positions = ledger.positions[name]
            dense[name_of[id(owner)]] += layer.dense_macs(positions)
            per_rank[name_of[id(owner)]] += positions * owner.weights(1)
        return cls(per_rank, dense, ledger.dense_macs - sum(dense.values()))

    def factored(self, ranks: Mapping[str, int]) -> int:
        """Return the cost with every layer factored."""
        return self.rest + sum(self.per_rank[name] * rank for name, rank in ranks.items())

    def layer(self, name: str, rank: int) -> int:
        """Return the cost of one layer, dense or factored, whichever is cheaper."""
        return min(self.dense[name], self.per_rank[name] * rank)

    def deployed(self, ranks: Mapping[str, int]) -> int:
        """Return the cost with each layer dense or factored, whichever is cheaper."""
        return self.rest + sum(self.layer(name, rank) for name, rank in ranks.items())


def alive_ranks(model: nn.Module) -> dict[str, int]:
    """Return how many ranks of each layer are not exactly zero."""
    return {name: int((values > 0).sum()) for name, values in importance(model).items()}


def lasting_ranks(model: nn.Module) -> dict[str, int]:
    """Return how many ranks of each layer matter: the tail behind them is negligible."""
    return {
        name: int((values > _NEGLIGIBLE * values[:1]).sum())
        for name, values in importance(model).items()
    }


def fitting_ranks(
    values: Mapping[str, Tensor], alive: Mapping[str, int], costs: Costs, limit: int
) -> dict[str, int]:
    """Return ranks within the limit that use nearly all of it and lose the least importance.

    A layer loses (importance of what goes / importance of all)². First the cheapest losses per
    saved cost go until little is too much; then all ways to drop a few more ranks per layer are
    compared.
    """
    ranks = dict(alive)

    def lost(name: str, rank: int) -> float:
        tails = values[name]
        return float((tails[rank] / tails[0]) ** 2) if rank < len(tails) and tails[0] > 0 else 0.0

    def price(name: str) -> float:
        saved = costs.layer(name, ranks[name]) - costs.layer(name, ranks[name] - 1)
        more = lost(name, ranks[name] - 1) - lost(name, ranks[name])
        return more / max(saved, 1e-9)  # above break-even a rank saves nothing: go on below it

    while costs.deployed(ranks) > _CLOSE * limit:
        name = min((n for n, rank in ranks.items() if rank > 1), key=price)
        ranks[name] -= 1
        if costs.dense[name] < costs.per_rank[name] * ranks[name]:
            ranks[name] = max(1, costs.dense[name] // costs.per_rank[name])
    # cost so far -> the smallest loss that reaches it, and how
    reached: dict[int, tuple[float, dict[str, int]]] = {costs.deployed(ranks): (0.0, {})}
    for name, rank in ranks.items():
        options = dict(reached)
        for fewer in range(max(1, rank - 4), rank):
            saved = costs.layer(name, rank) - costs.layer(name, fewer)
            more = lost(name, fewer) - lost(name, rank)
            for cost, (loss, changed) in reached.items():
                new = cost - saved
                if new >= _FULL * limit and loss + more < options.get(new, (math.inf,))[0]:
                    options[new] = loss + more, {**changed, name: fewer}
        reached = _thinned(options, limit)
    fitting = {cost: way for cost, way in reached.items() if cost <= limit}
    if fitting:
        return ranks | min(fitting.values(), key=lambda way: way[0])[1]
    while costs.deployed(ranks) > limit:  # pieces too large to use nearly all of the budget
        name = min((n for n, rank in ranks.items() if rank > 1), key=price)
        ranks[name] -= 1
    return ranks


def _thinned(
    options: dict[int, tuple[float, dict[str, int]]], limit: int
) -> dict[int, tuple[float, dict[str, int]]]:
    """Keep the best way for each of some five hundred ranges of cost."""
    width = max(1, round((_CLOSE - _FULL) * limit / 500))
    best: dict[int, int] = {}
    for cost, (loss, _) in options.items():
        place = cost // width if cost <= limit else -(cost // width)  # never mix the two sides
        if place not in best or loss < options[best[place]][0]:
            best[place] = cost
    return {cost: options[cost] for cost in best.values()}


def _typical_gradient(model: nn.Module) -> float:
    """Return the median over layers of the mean gradient norm of a rank of u."""
    norms = sorted(
        (float(layer.u.grad.norm()) / max(layer.rank, 1) ** 0.5)
        for layer in low_rank_layers(model).values()
        if layer.u.grad is not None
    )
    return norms[len(norms) // 2] if norms else 1e-4
