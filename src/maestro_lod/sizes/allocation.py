"""Rank allocation: the ranks within a cost limit that lose the least."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs

_FULL = 0.95  # the share of the limit that the model should use
_STEPS = 8192  # the number of steps into which a cost is divided


class Allocation:
    """The ranks that lose the least within any limit up to `most`, by dynamic programming.

    Layer by layer, the least sum of losses is computed for every cost that can be reached.

    Args:
        losses: What each layer loses with 0, 1, … ranks.
        choices: The ranks that each layer may have.
        cost_of: The cost of a layer by name and rank.
        most: The largest limit.
        rest: The cost of everything except the low-rank layers.
    """

    def __init__(
        self,
        losses: Mapping[str, Tensor],
        choices: Mapping[str, Sequence[int]],
        cost_of: Callable[[str, int], int],
        *,
        most: int,
        rest: int = 0,
    ) -> None:
        self._choices, self._cost_of, self._rest = choices, cost_of, rest
        self._grain = max(1, math.ceil((most - rest) / _STEPS))
        places = max(0, most - rest) // self._grain + 1
        self._least = torch.full((places,), math.inf, device="cpu")
        self._least[0] = 0.0
        self._ways: dict[str, Tensor] = {}
        for name, choice in choices.items():
            self._add(name, choice, losses[name])

    def _add(self, name: str, choice: Sequence[int], losses: Tensor) -> None:
        before, places = self._least, len(self._least)
        best = torch.full_like(before, math.inf)
        way = torch.zeros(places, dtype=torch.int64, device="cpu")
        for rank in choice:
            moved = self._grains(name, rank)
            if moved < places:
                new, least = before[: places - moved] + float(losses[rank]), best[moved:]
                way[moved:].masked_fill_(new <= least, rank)
                torch.minimum(new, least, out=least)
        self._least, self._ways[name] = best, way

    def _grains(self, name: str, rank: int) -> int:
        return math.ceil(self._cost_of(name, rank) / self._grain)

    def within(self, limit: int, *, full: float = _FULL) -> dict[str, int]:
        """Return the best ranks within a limit; if none are, the cheapest ones.

        Args:
            limit: The most that the model may cost.
            full: The share of the limit that it should cost if possible.
        """
        least = self._least[: max(0, limit - self._rest) // self._grain + 1]
        first = max(0, math.ceil((full * limit - self._rest) / self._grain))
        place = first + int(least[first:].argmin()) if first < len(least) else 0
        if not bool(least[place].isfinite()):
            place = int(least.argmin())
        if not bool(least[place].isfinite()):
            return {n: min(c, key=lambda r: self._cost_of(n, r)) for n, c in self._choices.items()}
        ranks: dict[str, int] = {}
        for name, way in reversed(self._ways.items()):
            ranks[name] = int(way[place])
            place -= self._grains(name, ranks[name])
        return {name: ranks[name] for name in self._choices}


def rank_choices(model: nn.Module) -> dict[str, range]:
    """Return the possible ranks of each layer; a frozen layer keeps its rank."""
    return {name: _choice(layer) for name, layer in low_rank_layers(model).items()}


def _choice(layer: LowRank) -> range:
    least = layer.rank if _is_frozen(layer) else min(1, layer.rank)
    return range(least, layer.rank + 1)


def _is_frozen(layer: LowRank) -> bool:
    return not (layer.u.requires_grad or layer.v.requires_grad)


def frozen_layers(model: nn.Module) -> list[str]:
    """Return the names of frozen low-rank layers, which keep all their ranks."""
    return [name for name, layer in low_rank_layers(model).items() if _is_frozen(layer)]


def smallest_cost(model: nn.Module, costs: Costs, kind: str) -> int:
    """Return the cost of the model with every layer at its cheapest rank."""
    return int(getattr(costs.rest, kind)) + sum(
        min(int(getattr(costs.layer(name, rank), kind)) for rank in choice)
        for name, choice in rank_choices(model).items()
    )
