"""Rank allocation by calibration: the ranks within a limit that lose the least.

Calibration knows the error of a layer's outputs with its first k ranks for every k. Small errors
add up over layers, so `Allocation` computes the best ranks within a limit. The result is an
estimate; with an objective the effect of each layer on the model is measured instead.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import ranks, require_low_rank, unwrapped
from maestro_lod.model.cost import Costs
from maestro_lod.model.inputs import Objective
from maestro_lod.model.limits import require_limits
from maestro_lod.sizes.allocation import Allocation
from maestro_lod.sizes.calibration import Calibration
from maestro_lod.sizes.measured_allocation import measure_losses, nested_ranks

_MOST_RANKS = 256  # the most ranks of a layer that are considered, evenly spaced


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
        objective: `objective(model)`, as for `frontier`. With it the loss is measured with each
            layer cut to a few ranks, one layer at a time.

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
    layers, costs = require_low_rank(model), Costs(model, None)
    limit = limit_on_params(max_params, costs)
    energies = rank_energies(layers, calibration)
    if objective is not None:
        losses = measure_losses(model, objective, energies)
        return ranks_by_losses(model, costs, losses, [limit])[limit]
    stored = {name: energies[name][: layer.rank] for name, layer in layers.items()}
    total = float(sum(energy.sum() for energy in stored.values())) or 1.0
    chosen = Allocation(
        {name: _lost(energy / total) for name, energy in stored.items()},
        {name: _choice(layer.rank) for name, layer in layers.items()},
        lambda name, rank: costs.layer(name, rank).params,
        most=limit,
        rest=costs.rest.params,
    ).within(limit)
    return _reached(chosen, limit, costs)


def ranks_by_losses(
    model: nn.Module, costs: Costs, losses: Mapping[str, Tensor], limits: Sequence[int]
) -> dict[int, dict[str, int]]:
    """Return the ranks for each limit on the parameters, by measured losses.

    Raises:
        OptionError: If a limit cannot be reached.
    """
    choices = {name: range(min(1, rank), rank + 1) for name, rank in ranks(model).items()}
    found = nested_ranks(model, costs, losses, limits, choices=choices)
    return {limit: _reached(of, limit, costs) for limit, of in found.items()}


def limit_on_params(max_params: float, costs: Costs) -> int:
    """Return the most parameters as a count; a float is a share of the dense model's."""
    require_limits({"max_params": max_params})
    share = not isinstance(max_params, numbers.Integral)
    return int(max_params * costs.dense.params if share else max_params)


def _reached(found: dict[str, int], limit: int, costs: Costs) -> dict[str, int]:
    """Return ranks that meet a limit; raise OptionError if they do not."""
    if (params := costs.at(found).params) > limit:
        raise OptionError(
            f"max_params={limit} cannot be reached: {costs.rest.params} parameters are outside of "
            f"the low-rank layers, and {params} remain at the smallest ranks. Give a larger limit, "
            "or decompose more layers (an embedding that is tied to the head: tied='share')."
        )
    return found


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


def _lost(energy: Tensor) -> Tensor:
    """Return the energy that is missing with 0, 1, … ranks."""
    return torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)])


def _choice(stored: int) -> range:
    """Return the ranks to consider, including the stored one."""
    step = max(1, stored // _MOST_RANKS)
    return range(stored - (stored - 1) // step * step if stored else 0, stored + 1, step)
