"""Where useless ranks stall: gradient steps never bring them to zero, but swing around it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from maestro_lod.layers.lowrank import LowRank

_SWING = {  # of one weight around zero, in learning rates; from simulations of the penalty alone
    torch.optim.Adam: 0.036, torch.optim.AdamW: 0.036, torch.optim.RAdam: 0.036,
    torch.optim.NAdam: 0.25, torch.optim.Adamax: 0.008, torch.optim.RMSprop: 0.35,
}  # fmt: skip


def reachable_importance(layer: LowRank, optimizer: Optimizer, penalty: float) -> float | None:
    """Estimate where the importance of useless ranks stalls under penalty gradients alone.

    The swing around zero grows with the learning rate. The constants fit simulations of the penalty
    alone, so this is an order of magnitude. None for an optimizer that was not simulated.
    """
    groups = [g for g in optimizer.param_groups if any(p is layer.u for p in g["params"])]
    if not groups:
        return None
    rate = float(groups[0]["lr"])
    if isinstance(optimizer, torch.optim.SGD):
        return float((0.3 * layer.rank * rate * penalty) ** 2)
    swing = _SWING.get(type(optimizer))
    if swing is not None:
        return float((swing * rate) ** 2 * (layer.u.numel() * layer.v.numel()) ** 0.5)
    return None


def stalled_above(
    layers: Mapping[str, LowRank], optimizer: Optimizer, penalty: float, threshold: float
) -> dict[str, float]:
    """Return the layers whose useless ranks stall above a threshold, and where."""
    floors = {n: reachable_importance(m, optimizer, penalty) for n, m in layers.items() if m.rank}
    return {name: floor for name, floor in floors.items() if floor and floor > threshold}
