"""Scale the gradients of factors, so that a step moves their product like a dense weight.

A step of size s along the gradients changes u·v by s·(u·uᵀ·G + G·vᵀ·v): large directions move
faster, and a learning rate that suits the dense layer may be too large for them. Multiplied by the
inverses of the ranks' Gram matrices v·vᵀ and uᵀ·u, both terms become projections of G.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from maestro_lod.distributed.shards import fill, gathered
from maestro_lod.layers.lowrank import LowRank

_DAMPING = 0.01
"""Relative to the mean square of a rank: limits the steps of ranks that are nearly zero."""


@torch.no_grad()
def scale_gradients(layers: Mapping[LowRank, int]) -> None:
    """Scale the gradients of the active ranks of each layer, in place."""
    for layer, rank in layers.items():
        stored = layer.stored_factors()
        if rank and all(factor.grad is not None for factor in stored):
            _scale(layer, rank, *stored)


def _scale(layer: LowRank, rank: int, stored_u: Tensor, stored_v: Tensor) -> None:
    assert stored_u.grad is not None and stored_v.grad is not None
    wide = torch.promote_types(stored_u.dtype, torch.float32)  # float32 or wider, for the inverse
    u, v = (f.to(wide) for f in layer._matrices(gathered(stored_u), gathered(stored_v)))
    gradients = gathered(stored_u.grad), gathered(stored_v.grad)
    grad_u, grad_v = (each.to(wide, copy=True) for each in layer._matrices(*gradients))
    grad_u[..., :rank] = grad_u[..., :rank] @ _inverse(v[:, :rank] @ v[:, :rank].mT)
    grad_v[:, :rank] = _inverse(u[..., :rank].mT @ u[..., :rank]) @ grad_v[:, :rank]
    for factor, new in zip((stored_u, stored_v), layer.to_factors(grad_u, grad_v), strict=True):
        assert factor.grad is not None
        fill(factor.grad, new)


def _inverse(gram: Tensor) -> Tensor:
    """Return the damped inverses of (groups, rank, rank) Gram matrices."""
    mean = gram.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(gram.dtype).tiny)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse: Tensor = torch.linalg.inv(gram + _DAMPING * mean[:, None, None] * eye)
    return inverse
