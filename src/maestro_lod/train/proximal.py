"""The proximal step of a training: after every step of its optimizer, at each group's own rate."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from maestro_lod.layers.lowrank import LowRank
from maestro_lod.train.penalty import prox_layers_
from maestro_lod.train.shrink import clear_moments


def press(layers: Iterable[LowRank], penalty: float, optimizer: Optimizer) -> None:
    """Do the proximal step of λ on some layers; the optimizer forgets ranks that become zero."""
    rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    left = prox_layers_(
        {
            layer: (
                rates.get(id(layer.u), 0.0) * penalty,
                rates.get(id(layer.v), 0.0) * penalty,
            )
            for layer in layers
        }
    )
    for layer, rank in left.items():
        if rank < layer.rank:
            clear_moments(layer, rank, optimizer)
