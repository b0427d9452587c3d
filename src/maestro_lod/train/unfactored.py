"""Train low-rank layers as dense weights, before ranks are sampled.

One factor becomes the identity and stays it, the other becomes the weight. A step then has the same
effect and cost as for the dense model, under any optimizer. Two trained factors would take another
path from the first step on, and learn more slowly.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.shards import fill, gathered
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.steps import call_after_steps


class Unfactored:
    """The layers of a model that are trained as dense weights, until `order_ranks` factors them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, ema: AveragedModel | None) -> None:
        self._layers = low_rank_layers(model)
        self._averaged = {} if ema is None else low_rank_layers(ema.module)
        self._optimizer = optimizer
        call_after_steps(optimizer, self._keep_identities)

    @property
    def names(self) -> list[str]:
        """The layers that are trained as dense weights now."""
        return [name for name, layer in self._layers.items() if layer.identity_factor is not None]

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks of these layers, which are all kept."""
        return {name: self._layers[name].rank for name in self.names}

    @torch.no_grad()
    def begin(self) -> None:
        """Turn layers at full rank with trainable factors to dense weights, with the same outputs.

        The optimizer's state of their factors is dropped.
        """
        for name, layer in self._layers.items():
            trained = all(factor.requires_grad for factor in layer.stored_factors())
            if layer.identity_factor is None and trained and 0 < layer.rank == layer.full_rank:
                for each in filter(None, (layer, self._averaged.get(name))):
                    _turn_to_weight(each)
                for factor in layer.stored_factors():
                    self._optimizer.state.pop(factor, None)

    def hold(self, names: Collection[str]) -> None:
        """Restore which layers are unfactored, after loading a checkpoint."""
        for name, layer in self._layers.items():
            layer.identity_factor = _identity_side(layer) if name in names else None

    @torch.no_grad()
    def _keep_identities(self) -> None:
        """Restore identities that weight decay has changed, as with gradients from DDP or FSDP."""
        for name in self.names:
            identity = _identity_factor(layer := self._layers[name])
            if identity.grad is not None:
                fill(identity, _identity_like(identity, layer))


def _identity_side(layer: LowRank) -> Any:
    """Return the name of the factor that can be the identity: the square one."""
    m, n = layer.matrix_shape
    return "u" if m <= n else "v"


def _turn_to_weight(layer: LowRank) -> None:
    stored = layer.stored_factors()
    left, right = layer._matrices(*map(gathered, stored))
    weight, eye = left @ right, _eye(layer, left)
    identity = _identity_side(layer)
    new = (eye, weight) if identity == "u" else (weight, eye)
    for factor, value in zip(stored, layer.to_factors(*new), strict=True):
        fill(factor, value)
    layer.identity_factor = identity


def _eye(layer: LowRank, like: Tensor) -> Tensor:
    """Return the identity matrix of each group, (groups, rank, rank)."""
    eye = torch.eye(layer.rank, dtype=like.dtype, device=like.device)
    return eye.expand(layer.groups, -1, -1)


def _identity_factor(layer: LowRank) -> nn.Parameter:
    u, v = layer.stored_factors()
    return u if layer.identity_factor == "u" else v


def _identity_like(identity: Tensor, layer: LowRank) -> Tensor:
    """Return the identity in the layout of its factor."""
    eye, (m, n) = _eye(layer, identity), layer.matrix_shape
    nothing = identity.new_zeros(())
    if layer.identity_factor == "u":
        return layer.to_factors(eye, nothing.expand(layer.groups, layer.rank, n))[0]
    return layer.to_factors(nothing.expand(layer.groups, m, layer.rank), eye)[1]
