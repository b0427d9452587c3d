"""Gradients of two factors, scaled so that a step moves their product as it would a dense weight.

A step of size s along plain gradients changes u·v by s·(u·uᵀ·G + G·vᵀ·v): directions that are large
already move faster, and a learning rate that suits the dense layer may be too large for them.
Multiplied by the inverses of vᵀ·v and u·uᵀ, seen from the ranks, both terms are projections of G.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from maestro_lod.distributed.shards import fill, gathered
from maestro_lod.layers.lowrank import LowRank

_DAMPING = 0.01
"""Times the mean square of a rank: keeps ranks that are nearly zero from moving without end."""


@torch.no_grad()
def scale_gradients(layers: Mapping[LowRank, int]) -> None:
    """Scale the gradients of layers in place, of as many leading ranks as are in use of each."""
    for layer, rank in layers.items():
        stored = layer.stored_factors()
        if rank and all(factor.grad is not None for factor in stored):
            _scale(layer, rank, *stored)


def _scale(layer: LowRank, rank: int, stored_u: Tensor, stored_v: Tensor) -> None:
    assert stored_u.grad is not None and stored_v.grad is not None
    wide = torch.promote_types(stored_u.dtype, torch.float32)  # nothing narrower is inverted
    u, v = (f.to(wide) for f in layer._matrices(gathered(stored_u), gathered(stored_v)))
    gradients = gathered(stored_u.grad), gathered(stored_v.grad)
    of_u, of_v = (each.to(wide, copy=True) for each in layer._matrices(*gradients))
    of_u[..., :rank] = of_u[..., :rank] @ _inverse(v[:, :rank] @ v[:, :rank].mT)
    of_v[:, :rank] = _inverse(u[..., :rank].mT @ u[..., :rank]) @ of_v[:, :rank]
    for factor, new in zip((stored_u, stored_v), layer.factors_of(of_u, of_v), strict=True):
        assert factor.grad is not None
        fill(factor.grad, new)


def _inverse(gram: Tensor) -> Tensor:
    """Invert (groups, rank, rank) matrices of products, damped."""
    mean = gram.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(gram.dtype).tiny)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse: Tensor = torch.linalg.inv(gram + _DAMPING * mean[:, None, None] * eye)
    return inverse
