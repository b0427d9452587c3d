"""A λ that does nothing: found after a third of a training, and once more at its end."""

from __future__ import annotations

from collections.abc import Mapping

from maestro_lod.layers.lowrank import LowRank

_MOST = 0.9  # of all ranks: a model that has lost no more after a third of its training will not
_SMALLER = 0.95  # of the dense parameters: a model that is not below this has not become smaller


def unshrunk(
    layers: Mapping[str, LowRank], relative_params: float, penalty: float, done: int, epochs: int
) -> str | None:
    """Say that a model under a penalty does not shrink, and what to change; None if it does.

    It is looked at when a third of the epochs is done, and at the end.
    """
    third, last = -(-epochs // 3), done == epochs
    if not penalty or relative_params < _SMALLER or not (last or done == third):
        return None
    left = sum(layer.rank for layer in layers.values())
    full = sum(layer.full_rank for layer in layers.values())
    if not last and left < _MOST * full:
        return None
    return (
        f"the model has not shrunk: after {done} of {epochs} epochs {left:,} of {full:,} ranks are "
        f"left, {relative_params:.2f}× of the dense parameters. penalty={penalty:.3g} is too weak "
        "for this model and this many steps. Name a size and λ finds itself: "
        "penalty=Budget(params=0.25), or budget.params=0.25 in a recipe."
    )
