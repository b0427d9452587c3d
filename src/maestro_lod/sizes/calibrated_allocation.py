"""Rank allocation by calibration: the ranks within a limit that lose the least.

Calibration knows the error of a layer's outputs with its first k ranks for every k. Small errors
add up over layers, so `Allocation` computes the best ranks within a limit. The result is an
estimate; with an objective several allocations are measured, and the best one is returned.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import require_low_rank, unwrapped
from maestro_lod.model.cost import Costs
from maestro_lod.model.inputs import Objective
from maestro_lod.model.limits import require_limits
from maestro_lod.sizes.allocation import Allocation
from maestro_lod.sizes.calibration import Calibration
from maestro_lod.sizes.frontier_search import frontier

_MOST_RANKS = 256  # the most ranks of a layer that are considered, evenly spaced
_EXPONENTS = (1.0, 0.75, 0.5)
"""The exponents of layers' total energies in the measured allocations: 1 is the estimate; smaller
ones reduce differences between layers, since errors of many layers do not exactly add up."""


def choose_ranks(
    model: nn.Module,
    calibration: Calibration,
    *,
    max_params: float,
    objective: Objective | None = None,
) -> dict[str, int]:
    """Choose the ranks of a decomposed model that lose the least within a limit; changes nothing.

    Args:
        model: A decomposed model.
        calibration: The result of `calibrate` with which it was decomposed. With a loss it weights
            layers by their effect on that loss; without one all layers count the same.
        max_params: The most parameters: an int is a count, a float a share of the dense model's.
        objective: `objective(model)`, as for `frontier`. With it several allocations are measured,
            and the best one is returned.

    Returns:
        The rank of each low-rank layer.

    Raises:
        LayerError: If there is no low-rank layer, or one was not calibrated.
        OptionError: If the limit is invalid or cannot be reached.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> calibration = lod.calibrate(model, [torch.randn(100, 64)])
        >>> model = lod.decompose(model, calibration=calibration)
        >>> ranks = lod.choose_ranks(model, calibration, max_params=0.5)
        >>> small = lod.extract(model, ranks)
    """
    model = unwrapped(model)
    layers = require_low_rank(model)
    costs, energies = Costs(model, None), rank_energies(layers, calibration)
    stored = {name: energies[name][: layer.rank] for name, layer in layers.items()}
    chosen = [
        ranks_within(max_params, costs, stored, exponent)
        for exponent in (_EXPONENTS if objective else _EXPONENTS[:1])
    ]
    if objective is None or chosen.count(chosen[0]) == len(chosen):
        return chosen[0]
    measured = frontier(model, objective, ranks=chosen, cost="params").points[1:]
    return dict(min(measured, key=lambda point: point.loss).ranks)


def rank_energies(layers: Mapping[str, nn.Module], calibration: Calibration) -> dict[str, Tensor]:
    """Return the energy of each rank of low-rank or dense layers.

    With gradients the energy is an estimate of the loss without the rank; else it is the rank's
    share of the layer's outputs, so that all layers count the same.
    """
    by_layer = {}
    for name, layer in layers.items():
        energy = calibration.energies(name, layer)
        if not calibration.has_gradients:
            energy = energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)
        by_layer[name] = energy
    return by_layer


def ranks_within(
    max_params: float, costs: Costs, energies: Mapping[str, Tensor], exponent: float = 1.0
) -> dict[str, int]:
    """Return the ranks within a limit whose missing energies have the least sum."""
    require_limits({"max_params": max_params})
    share = not isinstance(max_params, numbers.Integral)
    limit = int(max_params * costs.dense.params if share else max_params)
    scaled = {
        name: energy * float(energy.sum()) ** (exponent - 1.0) if energy.any() else energy
        for name, energy in energies.items()
    }
    total = float(sum(energy.sum() for energy in scaled.values())) or 1.0
    ranks = Allocation(
        {name: _lost(energy / total) for name, energy in scaled.items()},
        {name: _choice(len(energy)) for name, energy in energies.items()},
        lambda name, rank: costs.layer(name, rank).params,
        most=limit,
        rest=costs.rest.params,
    ).within(limit)
    if (params := costs.at(ranks).params) > limit:
        raise OptionError(
            f"max_params={limit} cannot be reached: {costs.rest.params} parameters are outside of "
            f"the low-rank layers, and {params} remain at the smallest ranks. Give a larger limit, "
            "or decompose more layers (an embedding that is tied to the head: tied='share')."
        )
    return ranks


def _lost(energy: Tensor) -> Tensor:
    """Return the energy that is missing with 0, 1, … ranks."""
    return torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)])


def _choice(stored: int) -> range:
    """Return the ranks to consider, including the stored one."""
    step = max(1, stored // _MOST_RANKS)
    return range(stored - (stored - 1) // step * step if stored else 0, stored + 1, step)
