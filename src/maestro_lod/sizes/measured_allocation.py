"""Measured allocation: ranks for all sizes, from the model's loss with one layer cut at a time.

The effect of a cut on the outputs of its layer, which calibration knows, says little about the
effect on the model: later layers can amplify errors or suppress them. Therefore each layer is cut
to a few ranks, one layer at a time, and the loss of the whole model is measured. Between these
ranks the loss follows the calibrated curve.

`Allocation` minimizes the sum of losses for one size after the other. The smallest size comes
first, because it has the fewest ranks to choose from; each larger one has at least its ranks in
every layer. Only then are ranks added that seem to lose nothing, until the sizes are as large as
asked for: the largest size comes first, and each smaller one has at most its ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Literal

import torch
from torch import Tensor, nn

from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import activated, require_low_rank
from maestro_lod.model.cost import Costs
from maestro_lod.model.inputs import Objective, require_number
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.allocation import Allocation, rank_choices
from maestro_lod.sizes.replay import alone_with

CostKind = Literal["params", "macs"]

_SHARES = (0.04, 0.1, 0.22, 0.45, 0.8)
"""Ranks at which a layer is measured, relative to the largest at which its factors save parameters.
"""
FEW_SHARES = (0.1, 0.3, 0.7)
"""The same for large models; more samples are worth more than more ranks."""
_MOST_RANKS = 256  # of a layer that an allocation chooses from
_LEAST, MOST_LOSS = 1e-9, 1e6  # below is rounding, above is a model that is broken


@torch.no_grad()
def measure_losses(
    model: nn.Module,
    objective: Objective,
    energies: Mapping[str, Tensor],
    *,
    shares: Sequence[float] = _SHARES,
    on_progress: OnProgress = lambda done, total, note: None,
) -> dict[str, Tensor]:
    """Return the loss that each layer of a model adds if it alone keeps 0, 1, … ranks.

    Args:
        model: A low-rank model whose ranks are ordered; it is not changed.
        objective: `objective(model)`: the loss on fixed batches, at active ranks; called without
            gradients and dropout, and with norms that use the statistics of the batch.
        energies: What each rank of a layer contributes to its outputs, by name of the layer.
        shares: Ranks at which a layer is measured, relative to the largest one that saves
            parameters.
        on_progress: `on_progress(done, total, note)` gets the number of layers that are done.
    """
    layers = require_low_rank(model)
    with alone_with(model):
        whole = require_number(objective(model), "objective")

        def added(layer: LowRank, rank: int) -> float:
            with activated({layer: rank}):
                value = require_number(objective(model), "objective") - whole
            return value if math.isfinite(value) else MOST_LOSS

        curves = {}
        for name, layer in layers.items():
            at = _measured_ranks(layer, shares)
            curves[name] = loss_curve(energies[name][: layer.rank], at, partial(added, layer))
            on_progress(len(curves), len(layers), "measuring")
        return curves


def count_measurements(model: nn.Module) -> int:
    """Return how often `measure_losses` evaluates the loss of a model."""
    layers = require_low_rank(model).values()
    return 1 + sum(len(_measured_ranks(layer, _SHARES)) for layer in layers)


def _measured_ranks(layer: LowRank, shares: Sequence[float]) -> list[int]:
    """Return the ranks at which a layer is measured; 0 tells what there is to lose."""
    if not layer.rank:
        return []
    most = max(1, min(layer.rank, layer.break_even))
    return sorted({0, *(max(1, round(share * most)) for share in shares)} - {layer.rank})


def loss_curve(energy: Tensor, at: Sequence[int], added: Callable[[int], float]) -> Tensor:
    """Return the loss at 0, 1, … ranks: measured at a few, between them by the lost energy.

    Args:
        energy: What each rank contributes to the outputs of the layer.
        at: The ranks at which the loss is measured, in ascending order.
        added: Measures the loss that is added at a rank.
    """
    curve = torch.zeros(len(energy) + 1, dtype=torch.float64, device="cpu")
    if not at:
        return curve
    lost = energy.double().cpu().flip(0).cumsum(0).flip(0)  # at all ranks but the full one
    logs = lost.clamp_min(max(1e-12 * float(lost.max()), 1e-300)).log()
    losses = [max(added(rank), _LEAST) for rank in at]
    for i in reversed(range(len(at) - 1)):  # fewer ranks never lose less, but for noise
        losses[i] = max(losses[i], losses[i + 1])
    for rank in range(len(energy)):
        curve[rank] = min(_between(rank, at, losses, logs), MOST_LOSS)
    return curve


def _between(rank: int, at: Sequence[int], losses: Sequence[float], logs: Tensor) -> float:
    """Interpolate between measured ranks, in logarithms; outside of them follow the energy."""
    right = bisect.bisect_left(at, rank)
    if right in (0, len(at)):
        near = min(right, len(at) - 1)
        change = float(logs[rank] - logs[at[near]])
        return losses[near] * math.exp(min(change, 0.0) if near else change)
    low, high = at[right - 1], at[right]
    whole = float(logs[low] - logs[high])
    way = float(logs[low] - logs[rank]) / whole if whole > 1e-12 else (rank - low) / (high - low)
    way = min(max(way, 0.0), 1.0)  # energies of ranks that are not orthogonal may not fall
    return losses[right - 1] * math.exp(way * math.log(losses[right] / losses[right - 1]))


def convex_losses(
    model: nn.Module, costs: Costs, losses: Mapping[str, Tensor], cost: CostKind = "params"
) -> dict[str, Tensor]:
    """Return for each layer the largest convex function of the cost that is not above its loss.

    For sizes that are trained after they are chosen. Where a layer gains nothing from one more rank
    and much from the next two, smaller sizes would spend what it needs on other layers, and no
    larger size could take it back.

    Args:
        model: The low-rank model.
        costs: The costs of the model at any ranks.
        losses: The result of `measure_losses`.
        cost: The cost that sizes limit.
    """
    return {
        name: _convex(
            losses[name],
            {rank: int(getattr(costs.layer(name, rank), cost)) for rank in _thinned(each)},
        )
        for name, each in rank_choices(model).items()
    }


def _convex(losses: Tensor, costs: Mapping[int, int]) -> Tensor:
    """Return the largest convex function of the cost that is nowhere above the losses."""
    corners: list[int] = []

    def slope(low: int, high: int) -> float:
        return float(losses[high] - losses[low]) / max(1e-9, costs[high] - costs[low])

    for rank in costs:
        while len(corners) > 1 and slope(corners[-1], rank) <= slope(*corners[-2:]):
            corners.pop()
        corners.append(rank)
    lowered = losses.double().clone()
    for low, high in pairwise(corners):
        for rank in range(low + 1, high):
            if rank in costs:
                lowered[rank] = losses[low] + slope(low, high) * (costs[rank] - costs[low])
    return lowered


def nested_ranks(
    model: nn.Module,
    costs: Costs,
    losses: Mapping[str, Tensor],
    limits: Iterable[int],
    cost: CostKind = "params",
    *,
    choices: Mapping[str, Sequence[int]] | None = None,
) -> dict[int, dict[str, int]]:
    """Return the ranks for each limit on a cost that lose the least.

    A smaller limit never has more ranks in a layer than a larger one. Every layer keeps a rank, and
    layers that are frozen keep all of theirs.

    Args:
        model: The low-rank model.
        costs: The costs of the model at any ranks.
        losses: The result of `measure_losses`.
        limits: Limits on the cost, in any order.
        cost: The cost that is limited.
        choices: The ranks that each layer may have, by default all.

    Returns:
        Limit → name → rank, the largest limit first; where no ranks meet a limit, those of the
        least cost.
    """
    all_choices: Mapping[str, Sequence[int]] = choices or rank_choices(model)
    allowed: dict[str, Sequence[int]] = {n: _thinned(each) for n, each in all_choices.items()}

    def cost_of(name: str, rank: int) -> int:
        return int(getattr(costs.layer(name, rank), cost))

    def best(limit: int, chosen: Mapping[str, Sequence[int]], **options: float) -> dict[str, int]:
        return Allocation(
            losses,
            chosen,
            cost_of,
            most=limit,
            rest=int(getattr(costs.rest, cost)),
        ).within(limit, **options)

    least: dict[int, dict[str, int]] = {}
    for limit in sorted(set(limits)):
        least[limit] = best(limit, allowed, full=0.0)
        allowed = {
            name: [rank for rank in each if rank >= least[limit][name]]
            for name, each in allowed.items()
        }
    found: dict[int, dict[str, int]] = {}
    most = {name: each[-1] for name, each in all_choices.items()}
    in_order = sorted(least, reverse=True)
    fewest = {name: each[0] for name, each in all_choices.items()}
    for limit, smaller in zip_longest(in_order, in_order[1:]):
        lowest = fewest if smaller is None else least[smaller]
        between = {
            name: _thinned([rank for rank in each if lowest[name] <= rank <= most[name]])
            for name, each in all_choices.items()
        }
        most = found[limit] = best(limit, between)
    return found


def _thinned(choice: Sequence[int]) -> list[int]:
    """Return at most `_MOST_RANKS` of the ranks, the smallest and the largest among them."""
    step = max(1, len(choice) // _MOST_RANKS)
    return sorted({*choice[::step], choice[-1]})
