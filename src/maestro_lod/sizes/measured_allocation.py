"""Measured allocation: ranks for all sizes, from the model's loss with one layer cut at a time.

The effect of a cut on the outputs of its layer, which calibration knows, says little about the
effect on the model: later layers can amplify errors or suppress them. Therefore each layer is cut
to a few ranks, one layer at a time, and the loss of the whole model is measured. Between these
ranks the loss follows the calibrated curve.

Small losses of several layers add up. Large ones do not: the sum of losses gives up the classifier
of a model that a small size ruins anyway. So a layer's loss counts the more, the nearer it comes to
the loss without the layer, L₀: as -L₀·log(1 - L/L₀), which is L where that is small. `Allocation`
minimizes the sum for one size after the other, each with no more ranks in a layer than the next
larger one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import activated, require_low_rank
from maestro_lod.model.cost import Costs
from maestro_lod.model.inputs import Objective, require_number
from maestro_lod.sizes.allocation import Allocation, rank_choices
from maestro_lod.sizes.replay import alone_with

CostKind = Literal["params", "macs"]

_SHARES = (0.04, 0.1, 0.22, 0.45, 0.8)
"""Ranks at which a layer is measured, relative to the largest one that saves parameters."""
_MOST_RANKS = 256  # of a layer that an allocation chooses from
_LEAST, MOST_LOSS = 1e-9, 1e6  # below is rounding, above is a model that is broken


@torch.no_grad()
def measure_losses(
    model: nn.Module, objective: Objective, energies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the loss that each layer of a model adds if it alone keeps 0, 1, … ranks.

    Args:
        model: A low-rank model whose ranks are ordered; it is not changed.
        objective: `objective(model)`: the loss on fixed batches, at active ranks; called without
            gradients and dropout, and with norms that use the statistics of the batch.
        energies: What each rank of a layer contributes to its outputs, by name of the layer.
    """
    layers = require_low_rank(model)
    with alone_with(model):
        whole = require_number(objective(model), "objective")

        def added(layer: LowRank, rank: int) -> float:
            with activated({layer: rank}):
                value = require_number(objective(model), "objective") - whole
            return value if math.isfinite(value) else MOST_LOSS

        return {
            name: loss_curve(
                energies[name][: layer.rank], _measured_ranks(layer), partial(added, layer)
            )
            for name, layer in layers.items()
        }


def count_measurements(model: nn.Module) -> int:
    """Return how often `measure_losses` evaluates the loss of a model."""
    layers = require_low_rank(model).values()
    return 1 + sum(len(_measured_ranks(layer)) for layer in layers)


def _measured_ranks(layer: LowRank) -> list[int]:
    """Return the ranks at which a layer is measured; 0 tells what there is to lose."""
    if not layer.rank:
        return []
    most = max(1, min(layer.rank, layer.break_even))
    return sorted({0, *(max(1, round(share * most)) for share in _SHARES)} - {layer.rank})


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
        return losses[near] * math.exp(float(logs[rank] - logs[at[near]]))
    low, high = at[right - 1], at[right]
    whole = float(logs[low] - logs[high])
    way = float(logs[low] - logs[rank]) / whole if whole > 1e-12 else (rank - low) / (high - low)
    return losses[right - 1] * math.exp(way * math.log(losses[right] / losses[right - 1]))


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
        Limit → name → rank; where no ranks meet a limit, those of the least cost.
    """
    all_choices: Mapping[str, Sequence[int]] = choices or rank_choices(model)
    allowed: dict[str, Sequence[int]] = {n: _thinned(each) for n, each in all_choices.items()}
    most = {name: max(float(loss[0]), _LEAST) for name, loss in losses.items()}
    lost = {name: loss / most[name] for name, loss in losses.items()}
    found: dict[int, dict[str, int]] = {}
    for limit in sorted(set(limits), reverse=True):
        ranks = Allocation(
            lost,
            allowed,
            lambda name, rank: int(getattr(costs.layer(name, rank), cost)),
            most=limit,
            rest=int(getattr(costs.rest, cost)),
            weights=most,
        ).within(limit)
        found[limit] = ranks
        allowed = {name: [r for r in each if r <= ranks[name]] for name, each in allowed.items()}
    return found


def _thinned(choice: Sequence[int]) -> list[int]:
    """Return at most `_MOST_RANKS` of the ranks, the smallest and the largest among them."""
    step = max(1, len(choice) // _MOST_RANKS)
    return sorted({*choice[::step], choice[-1]})
