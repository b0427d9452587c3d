"""The same architecture with fewer channels: what one would try first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.calls import Example
from maestro_lod.cost import Cost, count_params
from maestro_lod.counting import dense_macs
from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.methods.sizes import Measure, SizedSettings
from maestro_lod.methods.stages import Staged
from maestro_lod.train.method import Builder, setting


@dataclass(frozen=True)
class NarrowSettings(SizedSettings):
    """A size; the width follows."""

    size_in: Measure = setting("params", "what the size counts", choices=("params", "macs"))

    def build(self, builder: Builder, example: Example) -> nn.Module:
        if builder.width is None:
            raise OptionError(
                "method=narrow needs a model that can be built with other widths: its function "
                "must take a whole number as `width`."
            )

        return narrowed(builder, example, self.size, self.size_in)

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Narrow:
        return Narrow(model, optimizer, example=example, dense=dense)


class Narrow(Staged):
    """Trains a narrower model as it is, and compares it with the one of full width."""


def narrowed(builder: Builder, example: Example, share: float, measure: Measure) -> nn.Module:
    """Return the widest model within a share of the size that the one of full width has."""
    assert builder.width is not None

    def size_of(model: nn.Module) -> int:
        return count_params(model) if measure == "params" else dense_macs(model, example).total

    models: dict[int, nn.Module] = {}

    def at(width: int) -> int | None:
        try:
            models[width] = builder(width)
        except MaestroError:  # a width that does not fit the rest of the model
            return None
        return size_of(models[width])

    return models[widest(at, builder.width, size_of(builder()), share)]


def widest(at: Callable[[int], int | None], width: int, dense: int, share: float) -> int:
    """Return the largest width whose size is within a share of the dense one's, in few tries.

    `at` tells the size at a width, or None for one that cannot be. Sizes are about quadratic in the
    width, so the next try is where the line through the roots of two known sizes meets the limit.
    """
    limit, sizes = share * dense, {width: dense}

    def possible(width: int) -> bool:
        size = at(width)
        sizes[width] = size or 0
        return size is not None

    fits, too_wide = 0, width
    sizes[fits] = 0
    while too_wide - fits > 1:
        low, high = math.sqrt(sizes[fits]), math.sqrt(sizes[too_wide])
        ahead = (math.sqrt(limit) - low) / max(high - low, 1e-9) * (too_wide - fits)
        guess = min(max(fits + int(ahead), fits + 1), too_wide - 1)
        between = (*range(guess, fits, -1), *range(guess + 1, too_wide))
        tried = next(filter(possible, between), None)
        if tried is None:
            break
        fits, too_wide = (tried, too_wide) if sizes[tried] <= limit else (fits, tried)
    if fits == 0:
        least = sizes[too_wide] / dense
        raise OptionError(
            f"size={share:g} cannot be reached by a narrower model: width {too_wide} is the least "
            f"that can be built, and has {least:.4g} of the dense one."
        )
    return fits
