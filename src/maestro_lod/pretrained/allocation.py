"""Which ranks to keep, by what calibration knows: the least loss of energy per saved parameter.

What the first k ranks leave out of a layer's outputs is known for every k, and adds up over layers
as long as it is small. So the best ranks within a limit are found by arithmetic: each layer goes
down the lower convex hull of what it loses against what it costs, the cheapest step of all layers
first. That is an estimate; with a loss a few such allocations are measured, and the best is taken.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from maestro_lod.cost import Costs
from maestro_lod.deploy.frontier import frontier
from maestro_lod.deploy.limits import require_limits
from maestro_lod.deploy.replay import Loss
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import require_low_rank, unwrapped
from maestro_lod.pretrained.calibration import Calibration

_MOST_RANKS = 256  # of a layer that are considered, evenly spread
_EXPONENTS = (1.0, 0.75, 0.5)
"""How much a layer's energy counts beside those of others, in the allocations that are measured: 1
as estimated, below it less, since what many layers lose together does not quite add up."""


class _Option(NamedTuple):
    """What a layer costs at a rank, and what is then missing."""

    params: int
    missing: float
    rank: int


def choose_ranks(
    model: nn.Module, calibration: Calibration, *, max_params: float, loss: Loss | None = None
) -> dict[str, int]:
    """Return the ranks of a decomposed model that lose least within a limit; changes nothing.

    `max_params` is a number, or as a float a share of the dense model's parameters. Calibration
    with a loss tells what each layer matters; without one all count the same. With `loss(model)`,
    as for `frontier`, several allocations are measured on its batch and the best is returned.
    """
    model = unwrapped(model)
    require_limits({"max_params": max_params})
    costs, energies = Costs(model, None), energies_of(model, calibration)
    whole = not isinstance(max_params, numbers.Integral)
    limit = int(max_params * costs.dense.params if whole else max_params)
    chosen = [_within(limit, costs, energies, x) for x in (_EXPONENTS if loss else _EXPONENTS[:1])]
    if loss is None or chosen.count(chosen[0]) == len(chosen):
        return chosen[0]
    measured = frontier(model, loss, ranks=chosen, cost="params").points[1:]
    return dict(min(measured, key=lambda point: point.loss).ranks)


def energies_of(model: nn.Module, calibration: Calibration) -> dict[str, Tensor]:
    """Return how much each stored rank of a decomposed model contributes, layer by layer.

    With gradients that is what the loss is estimated to lose without the rank; else the share of
    the layer's outputs, as if all layers mattered the same.
    """
    found = {}
    for name, layer in require_low_rank(model).items():
        energy = calibration.energies(name, layer)[: layer.rank]
        if not calibration.has_gradients:
            energy = energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)
        found[name] = energy
    return found


def _within(
    limit: int, costs: Costs, energies: Mapping[str, Tensor], exponent: float
) -> dict[str, int]:
    """Go down from all ranks, the cheapest step of any layer first, until the limit is kept."""
    hulls = {}
    for name, energy in energies.items():
        scale = float(energy.sum()) ** (exponent - 1.0) if energy.any() else 0.0
        hulls[name] = _hull(_options(name, energy * scale, costs))
    ranks = {name: hull[0].rank for name, hull in hulls.items()}
    params = costs.rest.params + sum(hull[0].params for hull in hulls.values())
    steps = [
        ((low.missing - high.missing) / (high.params - low.params), name, high, low)
        for name, hull in hulls.items()
        for high, low in itertools.pairwise(hull)
    ]
    for _, name, high, low in sorted(steps, key=lambda step: step[0]):
        if params <= limit:
            break
        ranks[name] = low.rank
        params -= high.params - low.params
    if params > limit:
        raise OptionError(
            f"max_params={limit} cannot be reached: {costs.rest.params} parameters are outside of "
            f"the low-rank layers, and {params} are left at rank 1. Give a larger limit, or "
            "decompose more layers (an embedding that is tied to the head: tied='share')."
        )
    return ranks


def _options(name: str, energy: Tensor, costs: Costs) -> list[_Option]:
    """List what a layer can be, from all its ranks down, each cheaper than the one before."""
    stored = len(energy)
    missing = torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)]).tolist()
    spread = {max(1, round(stored * i / _MOST_RANKS)) for i in range(1, _MOST_RANKS + 1)}
    options: list[_Option] = []
    for rank in sorted(spread if stored else {0}, reverse=True):
        params = costs.layer(name, rank).params
        if not options or params < options[-1].params:
            options.append(_Option(params, missing[rank], rank))
    return options


def _hull(options: list[_Option]) -> list[_Option]:
    """Keep the options on the lower convex hull of what is missing against what it costs."""
    hull: list[_Option] = []
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(high: _Option, low: _Option) -> float:
    return (low.missing - high.missing) / (high.params - low.params)
