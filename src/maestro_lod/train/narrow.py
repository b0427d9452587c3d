"""Models of smaller width: the widest one within a share of the size."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.model.cost import count_params
from maestro_lod.model.inputs import Example
from maestro_lod.model.macs import dense_macs
from maestro_lod.train.method import Builder
from maestro_lod.train.size_settings import Measure


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
