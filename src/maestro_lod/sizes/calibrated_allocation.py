"""Which ranks to keep, by what calibration knows: those that lose the least within a limit.

What the first k ranks leave out of a layer's outputs is known for every k, and adds up over layers
as long as it is small. So `Allocation` finds the best ranks within a limit by arithmetic. That is
an estimate; with a loss a few such allocations are measured, and the best is taken.
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

_MOST_RANKS = 256  # of a layer that are considered, evenly spread
_EXPONENTS = (1.0, 0.75, 0.5)
"""How much a layer's energy counts beside those of others, in the allocations that are measured: 1
as estimated, below it less, since what many layers lose together does not quite add up."""


def choose_ranks(
    model: nn.Module,
    calibration: Calibration,
    *,
    max_params: float,
    objective: Objective | None = None,
) -> dict[str, int]:
    """Return the ranks of a decomposed model that lose least within a limit; changes nothing.

    >>> ranks = lod.choose_ranks(model, calibration, max_params=0.5)

    Args:
        model: The decomposed model.
        calibration: The calibration that it was decomposed with. With a loss it weights layers by
            their effect on that loss; without one all layers count the same.
        max_params: The most parameters: a number, or as a float a share of the dense model's.
        objective: `objective(model)`, as for `frontier`. With it several allocations are measured,
            and the best is returned.

    Returns:
        The ranks by layer.

    Raises:
        LayerError: The model has no low-rank layer, or one that was not calibrated.
        OptionError: The limit is not usable or cannot be reached.
    """
    model = unwrapped(model)
    layers = require_low_rank(model)
    costs, energies = Costs(model, None), energies_of(layers, calibration)
    stored = {name: energies[name][: layer.rank] for name, layer in layers.items()}
    chosen = [
        ranks_within(max_params, costs, stored, exponent)
        for exponent in (_EXPONENTS if objective else _EXPONENTS[:1])
    ]
    if objective is None or chosen.count(chosen[0]) == len(chosen):
        return chosen[0]
    measured = frontier(model, objective, ranks=chosen, cost="params").points[1:]
    return dict(min(measured, key=lambda point: point.loss).ranks)


def energies_of(layers: Mapping[str, nn.Module], calibration: Calibration) -> dict[str, Tensor]:
    """Return how much each rank of layers contributes, be they low-rank or still dense.

    With gradients that is what the loss is estimated to lose without the rank; else the share of
    the layer's outputs, as if all layers mattered the same.
    """
    found = {}
    for name, layer in layers.items():
        energy = calibration.energies(name, layer)
        if not calibration.has_gradients:
            energy = energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)
        found[name] = energy
    return found


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
            f"the low-rank layers, and {params} are left at the smallest ranks. Give a larger "
            "limit, or decompose more layers (an embedding that is tied to the head: tied='share')."
        )
    return ranks


def _lost(energy: Tensor) -> Tensor:
    """Return which share is lost with 0, 1, … ranks: shares multiply as what is missing adds up."""
    missing = torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)])
    return -torch.expm1(-missing)


def _choice(stored: int) -> range:
    """Return the ranks that are considered, the stored one among them."""
    step = max(1, stored // _MOST_RANKS)
    return range(stored - (stored - 1) // step * step if stored else 0, stored + 1, step)
