"""Size settings of methods, and the ranks or the width that reach a size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Cost, Costs, count_params
from maestro_lod.model.inputs import Example
from maestro_lod.model.macs import dense_macs
from maestro_lod.model.replace import copy_on_meta
from maestro_lod.model.structure import restructure, uninitialized
from maestro_lod.model.survey import Plan
from maestro_lod.train.method import Builder, Settings, setting

Measure = Literal["params", "macs"]


def require_share(value: Any) -> Any:
    """Return a share of the dense model; raise ValueError for anything else."""
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if isinstance(value, bool) or not 0.0 < share < 1.0:
        raise ValueError("must be a share of the dense model between 0 and 1")
    return share


@dataclass(frozen=True)
class SizedSettings(Settings):
    """Settings of a method that reaches a given size."""

    size: float = setting(0.25, "share of the dense model to reach", check=require_share)

    @classmethod
    def at_size(cls, size: float) -> dict[str, Any]:
        return {"size": size}


def amount(cost: Cost, measure: Measure) -> int:
    """Return the parameters or the MACs of a cost."""
    return cost.params if measure == "params" else cost.macs or 0


def require_reachable(size: float, least: float, why: str, more: str = "") -> None:
    """Raise OptionError for a size below the smallest one.

    Args:
        size: The size, as a share of dense.
        least: The smallest size.
        why: The reason for it, for the message.
        more: What would make it smaller, for the message.
    """
    if size < least:
        raise OptionError(
            f"size={size:g} cannot be reached: {why}, {least:.4g} of the dense model is left. Give "
            f"at least that{more}."
        )


RANK_1 = "with rank 1 in every layer that is decomposed"
MORE_LAYERS = ", or decompose more layers (keep_ends=false, decompose.skip)"


def full_rank_costs(
    model: nn.Module, example: Example, chosen: Mapping[str, Any]
) -> tuple[Costs, dict[str, int]]:
    """Return the costs of a dense model at any ranks, if it were decomposed, and the full ranks.

    Args:
        model: The dense model.
        example: An input of the model.
        chosen: Options of `decompose` that choose layers.
    """
    twin = copy_on_meta(model)
    twin = restructure(twin, Plan(twin, **chosen).structure(), fill=uninitialized)
    full = {name: layer.full_rank for name, layer in low_rank_layers(twin).items()}
    return Costs(twin, dense_macs(twin, example)), full


def ranks_within_size(
    costs: Costs, full: Mapping[str, int], size: float, measure: Measure
) -> dict[str, int]:
    """Return the largest ranks within a size that are the same share of all full ranks."""

    def at(share: float) -> dict[str, int]:
        return {name: max(1, int(share * rank)) for name, rank in full.items()}

    def fits(share: float) -> bool:
        return amount(costs.at(at(share)), measure) <= size * amount(costs.dense, measure)

    least = amount(costs.at(at(0.0)), measure) / amount(costs.dense, measure)
    require_reachable(size, least, RANK_1, MORE_LAYERS)
    return at(largest_share(fits))


def largest_share(fits: Callable[[float], bool]) -> float:
    """Return the largest share in [0, 1] that fits, to a millionth; 0 always fits."""
    low, high = 0.0, 1.0
    if fits(high):
        return high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- narrower models -------------------------------------------------------------------------------


def build_narrower(builder: Builder, example: Example, share: float, measure: Measure) -> nn.Module:
    """Return the widest model within a share of the size of the model at full width."""
    assert builder.width is not None

    def count_size(model: nn.Module) -> int:
        return count_params(model) if measure == "params" else dense_macs(model, example).total

    models: dict[int, nn.Module] = {}

    def size_at(width: int) -> int | None:
        try:
            models[width] = builder(width)
        except MaestroError:  # this width does not fit the rest of the model
            return None
        return count_size(models[width])

    return models[widest(size_at, builder.width, count_size(builder()), share)]


def widest(size_at: Callable[[int], int | None], width: int, dense: int, share: float) -> int:
    """Return the largest width whose size is within a share of the dense size, in few tries.

    `size_at` returns the size at a width, or None for one that cannot be built. Sizes are about
    quadratic in the width, so that the next try interpolates the square roots of two known sizes.
    """
    limit, sizes = share * dense, {width: dense}

    def possible(width: int) -> bool:
        size = size_at(width)
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
            f"size={share:g} cannot be reached by a narrower model: the smallest possible width is "
            f"{too_wide}, with {least:.4g} of the dense model. Give at least that."
        )
    return fits
