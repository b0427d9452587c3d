"""Protect ranks that start with one zero factor from being pruned before they can be trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from maestro_lod.distributed.shards import is_sharded, sums_by_rank
from maestro_lod.errors import TrainingError
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.shrink import ranks_above


def unmoved_ranks(model: nn.Module) -> dict[str, int]:
    """Return the last rank of each layer that is zero in one factor alone, if there is one.

    Ranks without a singular value start with one zero factor, which gets a gradient: such a rank is
    not useless but untrained. Frozen layers are left out.
    """
    masks = {name: _unmoved(layer) for name, layer in low_rank_layers(model).items()}
    return {name: int(mask.nonzero().max()) + 1 for name, mask in masks.items() if bool(mask.any())}


def mostly_zero_initialized(model: nn.Module) -> bool:
    """Return True if half or more of a layer's ranks are zero in one factor alone.

    A single one of many ranks, such as an embedding's padding row causes, does not matter.
    """
    layers = low_rank_layers(model).values()
    return any(0 < layer.rank <= 2 * int(_unmoved(layer).sum()) for layer in layers)


def _unmoved(layer: LowRank) -> Tensor:
    """Return a mask of the trainable ranks that are zero in one factor alone."""
    unmoved = torch.logical_xor(*_moved_ranks(layer))
    trained = layer.u.requires_grad or layer.v.requires_grad
    return unmoved if trained else torch.zeros_like(unmoved)


def _moved_ranks(layer: LowRank) -> list[Tensor]:
    """Return masks of the ranks that are not zero, in u and in v."""
    factors = layer.stored_factors()
    if any(map(is_sharded, factors)):
        counts = sums_by_rank(factors, torch.float32, lambda part, others: (part != 0).sum(others))
        return [count > 0 for count in counts]
    u, v = factors[0].detach().movedim(1, 0).flatten(1), factors[1].detach().flatten(1)
    return [(u != 0).any(1), (v != 0).any(1)]


class ProtectedRanks:
    """Keeps ranks that started as zero in one factor, for an epoch and until they move."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.ranks = unmoved_ranks(model)

    def useful_ranks(
        self,
        epoch: int,
        threshold: float | None,
        min_rank: int,
        unfactored: Mapping[str, int],
        *,
        remedy: str,
    ) -> dict[str, int] | None:
        """Return the rank that each layer keeps at the end of an epoch.

        Args:
            epoch: The epoch that ends, counted from 0.
            threshold: The importance at or below which ranks are useless; None if none is removed.
            min_rank: The smallest rank of a layer.
            unfactored: The ranks of layers that are trained as dense weights now: all are kept.
            remedy: The advice of the error if no rank is left.

        Raises:
            TrainingError: Weights are not finite, or no layer would have a rank left.
        """
        if self.ranks and epoch:
            now = unmoved_ranks(self._model)
            self.ranks = {n: min(r, now[n]) for n, r in self.ranks.items() if n in now}
        if threshold is None:
            return None
        floor = {**self.ranks, **unfactored}
        above = ranks_above(self._model, threshold, min_rank)
        keep = {name: max(rank, floor.get(name, 0)) for name, rank in above.items()}
        if not any(keep.values()):
            raise TrainingError(
                f"every rank of every layer is at or below threshold={threshold}, so that none "
                f"would be left. {remedy}"
            )
        return keep
