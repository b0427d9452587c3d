"""Rank order: sort the ranks of a model by singular values, with unchanged weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.shards import fill, gathered
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.layers.svd import svd_factors
from maestro_lod.sizes.averages import require_no_other_average


@torch.no_grad()
def lost_energy(layer: LowRank) -> Tensor:
    """Return the shares of its squared weights that a layer loses with 0, 1, … ranks."""
    u, v = (f.double().cpu() for f in layer._matrices(*map(gathered, layer.stored_factors())))
    products = ((u.mT @ u) * (v @ v.mT)).sum(0)  # of ranks as matrices, over all groups
    tails = products.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0).clamp(min=0)
    tails = F.pad(tails, (0, 1))
    return tails / tails[0].clamp(min=1e-300)


@torch.no_grad()
def order_ranks(
    model: nn.Module, optimizer: Optimizer | None = None, ema: AveragedModel | None = None
) -> None:
    """Replace the factors of every trained layer with those of its SVD; weights stay the same.

    The first k ranks then are the best approximation of rank k. The optimizer's state of the
    factors, and the averaged copy, are transformed too. Sharded factors are gathered one layer at a
    time.
    """
    require_no_other_average(model, ema)
    averaged = {} if ema is None else low_rank_layers(ema.module)
    for name, layer in low_rank_layers(model).items():
        if layer.rank and all(factor.requires_grad for factor in layer.stored_factors()):
            _order(layer, {} if optimizer is None else optimizer.state, averaged.get(name))


def _order(layer: LowRank, states: Mapping[Any, Any], averaged: LowRank | None) -> None:
    stored_u, stored_v = layer.stored_factors()
    u, v = (f.double() for f in layer._matrices(gathered(stored_u), gathered(stored_v)))
    new_u, new_v = svd_factors(u @ v, layer.rank)
    # u is multiplied by `forth` and v by `back`; gradients of u by back and those of v by forth
    forth, back = torch.linalg.pinv(u) @ new_u, new_v @ torch.linalg.pinv(v)
    if averaged is not None:
        averaged_u, averaged_v = averaged.stored_factors()
        _turn_u(averaged_u, forth)
        _turn_v(averaged_v, back)
    if layer.identity_factor is not None:
        _share_moments(layer, states, new_u, new_v)
    if layer.identity_factor != "u":
        for held in _moments(stored_u, states):
            _turn_u(held, _suited(held, back.mT))
    if layer.identity_factor != "v":
        for held in _moments(stored_v, states):
            _turn_v(held, _suited(held, forth.mT))
    for stored, new in zip((stored_u, stored_v), layer.to_factors(new_u, new_v), strict=True):
        fill(stored, new)
    for each in filter(None, (layer, averaged)):
        each.identity_factor = None  # both factors are trained from now on


def _moments(factor: Tensor, states: Mapping[Any, Any]) -> list[Tensor]:
    """Return the state tensors of an optimizer with the shape of a factor."""
    held = states.get(factor, {}).values()
    return [t for t in held if isinstance(t, Tensor) and t.ndim and t.shape == factor.shape]


def _share_moments(layer: LowRank, states: Any, new_u: Tensor, new_v: Tensor) -> None:
    """Compute the optimizer state of the identity factor from that of the weight.

    A gradient G of the weight gives G·vᵀ for u, and uᵀ·G for v.
    """
    u, v = layer.stored_factors()
    weight, still = (v, u) if layer.identity_factor == "u" else (u, v)
    state = states.setdefault(still, {}) if weight in states else {}
    for key, value in states.get(weight, {}).items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            state[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        whole = gathered(value).double()
        if layer.identity_factor == "u":
            matrices = layer._matrices(gathered(u).double(), whole)[1]
            projected = matrices @ _suited(value, new_v.mT)
            shared = layer.to_factors(projected, new_v)[0]
        else:
            matrices = layer._matrices(whole, gathered(v).double())[0]
            projected = _suited(value, new_u.mT) @ matrices
            shared = layer.to_factors(new_u, projected)[1]
        fill(state.setdefault(key, torch.empty_like(still)), shared)


def _suited(held: Tensor, turn: Tensor) -> Tensor:
    """Return the transform of means of gradients or, for states without negatives, of squares."""
    return turn.square() if bool((gathered(held) >= 0).all()) else turn


def _turn_u(u: Tensor, turn: Tensor) -> None:
    """Multiply a tensor shaped as `u` by (groups, rank, rank) from the right, in place."""
    by_group = gathered(u).double().reshape(len(turn), -1, u.shape[1], u.shape[2:].numel())
    fill(u, torch.einsum("gork,grs->gosk", by_group, turn).reshape(u.shape))


def _turn_v(v: Tensor, turn: Tensor) -> None:
    """Multiply a tensor shaped as `v` by (groups, rank, rank) from the left, in place."""
    by_group = gathered(v).double().reshape(len(v), len(turn), -1)
    fill(v, torch.einsum("gsr,rgn->sgn", turn, by_group).reshape(v.shape))
