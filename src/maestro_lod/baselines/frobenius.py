"""Frobenius decay (Khodak et al., ICLR 2021): weight decay of the product of two factors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.layers.ranks import low_rank_layers


class Pair(NamedTuple):
    """Two factors of one weight: u (out, r, …) and v (r, in, …)."""

    u: nn.Parameter
    v: nn.Parameter
    groups: int = 1


class FrobeniusDecay:
    """Adds the gradient of ½·λ·‖UV‖² for each pair, in place of the optimizer's weight decay.

    λ is `strength`, or by default the weight decay that the optimizer had for the factors.
    """

    def __init__(
        self, optimizer: Optimizer, pairs: Iterable[Pair], strength: float | None = None
    ) -> None:
        self.pairs = [*pairs]
        factors = {id(p) for pair in self.pairs for p in (pair.u, pair.v)}
        decays: dict[int, float] = {}
        for group in [*optimizer.param_groups]:
            mine = [p for p in group["params"] if id(p) in factors]
            decays |= {id(p): float(group.get("weight_decay", 0.0)) for p in mine}
            if mine and group.get("weight_decay"):
                group["params"][:] = [p for p in group["params"] if id(p) not in factors]
                optimizer.add_param_group({**group, "params": mine, "weight_decay": 0.0})
        self.strengths = [
            decays.get(id(pair.u), 0.0) if strength is None else strength for pair in self.pairs
        ]

    def add_gradients(self, weight: float) -> None:
        """Add the gradients of the decay, times `weight`, to the gradients of the factors."""
        for pair, strength in zip(self.pairs, self.strengths, strict=True):
            if strength:
                of_u, of_v = frobenius_gradients(pair)
                for parameter, gradient in ((pair.u, of_u), (pair.v, of_v)):
                    if parameter.grad is not None:
                        parameter.grad.add_(gradient, alpha=weight * strength)


@torch.no_grad()
def frobenius_gradients(pair: Pair) -> tuple[Tensor, Tensor]:
    """Return the gradients of ½·‖UV‖² with respect to both factors: U·(VVᵀ) and (UᵀU)·V."""
    groups, rank = pair.groups, pair.v.shape[0]
    u = pair.u.reshape(groups, -1, rank, pair.u[0, 0].numel())  # (groups, out, rank, kernel)
    v = pair.v.reshape(rank, groups, -1)
    gram_v = torch.einsum("rgn,sgn->grs", v, v)
    gram_u = torch.einsum("gork,gosk->grs", u, u)
    of_u = torch.einsum("gork,grs->gosk", u, gram_v)
    of_v = torch.einsum("grs,sgn->rgn", gram_u, v)
    return of_u.reshape(pair.u.shape), of_v.reshape(pair.v.shape)


def low_rank_pairs(model: nn.Module) -> list[Pair]:
    """Return the pair of factors of each low-rank layer."""
    return [Pair(layer.u, layer.v, layer.groups) for layer in low_rank_layers(model).values()]
