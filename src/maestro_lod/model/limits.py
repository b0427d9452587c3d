"""Points (one submodel with its costs) and limits on them."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from maestro_lod.errors import OptionError, listed, suggest

LIMITS = ("max_params", "max_macs", "max_bytes", "max_latency", "min_accuracy")


@dataclass(frozen=True)
class Point:
    """One submodel: its ranks, how good it is, and what it costs deployed.

    Costs are those of the form that `fuse` gives it: each layer dense or factored, whichever has
    fewer parameters. What was not measured is None.
    """

    ranks: dict[str, int]
    loss: float
    accuracy: float | None
    params: int
    macs: int | None
    bytes: int
    """The size of all parameters and buffers."""
    latency: float | None = None
    """Seconds."""


@dataclass(frozen=True)
class Limit:
    """A bound on one property of submodels."""

    key: str
    bound: float
    shown: str

    def excess(self, point: Point) -> float:
        """Return by how much a point misses the limit, relative to it; not above 0 if it holds."""
        value = float(getattr(point, self.key))
        if self.key == "accuracy":
            return self.bound - value
        return (value - self.bound) / (self.bound or 1.0)  # a share of no MACs is none


def require_limits(limits: Mapping[str, float | None]) -> None:
    """Refuse limits that make no sense for any model; needs no frontier, so it can come first."""
    given = {option: value for option, value in limits.items() if value is not None}
    if not given:
        raise OptionError(f"no limit was given. Give one or more of {listed(LIMITS)}.")
    for option, value in given.items():
        _require_limit(option, value)


def _require_limit(option: str, value: float) -> None:
    if option not in LIMITS:
        raise OptionError(
            f"there is no limit {option!r}.{suggest(option, LIMITS)} Limits: {listed(LIMITS)}."
        )
    key, shown = option.partition("_")[2], f"{option}={value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionError(f"{shown} is not a number.")
    if key == "accuracy":
        if not 0 <= value <= 1:
            raise OptionError(f"{shown} must be a share between 0 and 1.")
    elif not 0 < value < 2**63:
        raise OptionError(f"{shown} must be a finite number above 0, and below 2**63.")
    elif key != "latency" and not isinstance(value, numbers.Integral) and value > 1:
        raise OptionError(
            f"{shown}: a float is a share of the dense model's {key} and lies in (0, 1]. "
            "Give an int for a number."
        )


def limit_of(option: str, value: float, points: Iterable[Point], dense: Point) -> Limit:
    """Check a limit that a user set on these points; shares are of the dense model's cost."""
    _require_limit(option, value)
    key, shown, bound = option.partition("_")[2], f"{option}={value!r}", float(value)
    if any(getattr(p, key) is None for p in points):
        how = {
            "macs": "Give frontier(…) an example=.",
            "latency": "Use with_latency(…).",
            "accuracy": "Give frontier(…) an accuracy=.",
        }[key]
        raise OptionError(f"{shown} cannot be used: this frontier knows no {key}. {how}")
    if key in ("params", "macs", "bytes") and not isinstance(value, numbers.Integral):
        bound *= getattr(dense, key)
    return Limit(key, bound, shown)
