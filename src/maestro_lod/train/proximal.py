"""The proximal step of a training: after every step of its optimizer, at each group's own rate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from maestro_lod.layers.lowrank import LowRank
from maestro_lod.train.penalty import prox_layers_
from maestro_lod.train.shrink import clear_moments

Rates = dict[int, float]
"""The learning rate of each parameter, by its id."""


def call_after_steps(optimizer: Optimizer, method: Callable[[Rates], None]) -> None:
    """Call a bound method after every optimizer step that was done, while its object lives."""
    weak = weakref.WeakMethod(method)

    def after_step(*_: Any) -> None:
        call = weak()
        skipped = getattr(optimizer, "found_inf", None)
        if call is None or (skipped is not None and skipped > 0):
            return  # GradScaler lets fused optimizers skip the step themselves
        call({id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]})

    optimizer.register_step_post_hook(after_step)


def call_before_steps(optimizer: Optimizer, method: Callable[[], None]) -> None:
    """Call a bound method before every optimizer step, while its object lives."""
    weak = weakref.WeakMethod(method)

    def before_step(*_: Any) -> None:
        if (call := weak()) is not None:
            call()

    optimizer.register_step_pre_hook(before_step)


def press(layers: Iterable[LowRank], penalty: float, optimizer: Optimizer, rates: Rates) -> None:
    """Do the proximal step of λ on some layers; the optimizer forgets ranks that become zero."""
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
