"""Ranks that begin as zero in one factor: what no shrink removes before it had a chance to move."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from maestro_lod.distributed.shards import is_sharded, sums_by_rank
from maestro_lod.errors import listed
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers

_LARGEST_STEP = 1.0  # learning rate over (1 - momentum), times the growth of a step by factoring


def unmoved_ranks(model: nn.Module) -> dict[str, int]:
    """Return the last rank of each layer that is zero in one factor alone, of those that have any.

    That is how a rank without singular value begins. The factor that is zero gets a gradient, so
    such a rank is not useless: nothing has moved it yet. Layers that are frozen are left out.
    """
    unmoved = {name: _unmoved(layer) for name, layer in low_rank_layers(model).items()}
    return {name: int(of.nonzero().max()) + 1 for name, of in unmoved.items() if bool(of.any())}


def much_is_unmoved(model: nn.Module) -> bool:
    """Say whether a layer begins with half of its ranks, or more, as zero in one factor alone.

    One rank of many, as the row that an embedding has for padding leaves, holds nothing up.
    """
    layers = low_rank_layers(model).values()
    return any(0 < layer.rank <= 2 * int(_unmoved(layer).sum()) for layer in layers)


def _unmoved(layer: LowRank) -> Tensor:
    """Say for each rank whether it is zero in one factor alone, and trained."""
    unmoved = torch.logical_xor(*_moved_ranks(layer))
    trained = layer.u.requires_grad or layer.v.requires_grad
    return unmoved if trained else torch.zeros_like(unmoved)


def _moved_ranks(layer: LowRank) -> list[Tensor]:
    """Say for each rank of u, and of v, whether it is not zero."""
    factors = layer.stored_factors()
    if any(map(is_sharded, factors)):
        counts = sums_by_rank(factors, torch.float32, lambda part, others: (part != 0).sum(others))
        return [count > 0 for count in counts]
    u, v = factors[0].detach().movedim(1, 0).flatten(1), factors[1].detach().flatten(1)
    return [(u != 0).any(1), (v != 0).any(1)]


def warn_of_large_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn if SGD, which suited weights that were trained whole, is too fast for their factors.

    A step of factors moves their product by ‖u‖² + ‖v‖² times what the dense weight would move by,
    and a layer that was zero has large factors once it has been trained. At sampled ranks gradients
    are large too, so that training falls apart and does not come back.
    """
    if not isinstance(optimizer, SGD):  # others go by the signs of gradients
        return
    rates = {
        id(p): float(group["lr"]) / (1 - min(float(group["momentum"]), 0.999))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    fast = [
        name
        for name, layer in low_rank_layers(model).items()
        if layer.rank and not any(map(is_sharded, layer.stored_factors()))
        if rates.get(id(layer.u), 0.0) * _growth(layer) > _LARGEST_STEP
    ]
    if fast:
        warnings.warn(
            f"SGD's learning rate suits dense weights, but is too large for the factors of "
            f"{listed(fast)}, whose ranks are sampled from now on: training may fall apart. Clip "
            "gradients (clip_norm=1.0), or lower the learning rate or the momentum.",
            stacklevel=3,  # whoever ends the epoch
        )


def _growth(layer: LowRank) -> float:
    """Return how much faster the first rank moves than the weight that it is part of."""
    first = layer.u.detach()[:, 0], layer.v.detach()[0]
    return sum(float(part.float().square().sum()) for part in first) if layer.u.requires_grad else 0


class Grace:
    """Spares ranks that were zero in one factor at the start: for an epoch, and while they are."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.ranks = unmoved_ranks(model)

    def end_epoch(self, epoch: int) -> dict[str, int]:
        """Return what no layer is cut below at the end of this epoch, the first one being 0."""
        if self.ranks and epoch:
            now = unmoved_ranks(self._model)
            self.ranks = {n: min(r, now[n]) for n, r in self.ranks.items() if n in now}
        return self.ranks


def at_least(ranks: Mapping[str, int], floor: Mapping[str, int]) -> dict[str, int]:
    """Return ranks, raised to a floor where a layer has one."""
    return {name: max(rank, floor.get(name, 0)) for name, rank in ranks.items()}
