"""Size: one submodel and its costs; and the limits that users set on sizes."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from maestro_lod.errors import OptionError, listed, suggest

LIMITS = ("max_params", "max_macs", "max_bytes", "max_latency", "min_accuracy")


@dataclass(frozen=True)
class Size:
    """One submodel: its ranks, its loss and accuracy, and its costs when deployed.

    Costs are those of the deployed model, with each layer in its smallest form. Values that were
    not measured are None.
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
    text: str

    def excess(self, size: Size) -> float:
        """Return how far a size exceeds the limit, relative to it; at most 0 if it is met."""
        value = float(getattr(size, self.key))
        if self.key == "accuracy":
            return self.bound - value
        return (value - self.bound) / (self.bound or 1.0)  # a model may have 0 MACs


def require_limits(limits: Mapping[str, float | None]) -> None:
    """Raise OptionError for invalid limits; needs no frontier, so it can run before a search."""
    set_limits = {option: value for option, value in limits.items() if value is not None}
    if not set_limits:
        raise OptionError(f"no limit was given. Give one or more of {listed(LIMITS)}.")
    for option, value in set_limits.items():
        _require_limit(option, value)


def _require_limit(option: str, value: float) -> None:
    if option not in LIMITS:
        raise OptionError(
            f"there is no limit {option!r}.{suggest(option, LIMITS)} Limits: {listed(LIMITS)}."
        )
    key, text = option.partition("_")[2], f"{option}={value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionError(f"{text} is not a number. Give one.")
    if key == "accuracy":
        if not 0 <= value <= 1:
            raise OptionError(f"{text} must be a share between 0 and 1.")
    elif not 0 < value < 2**63:
        raise OptionError(f"{text} must be a finite number above 0, and below 2**63.")
    elif key != "latency" and not isinstance(value, numbers.Integral) and value > 1:
        raise OptionError(
            f"{text}: a float is a share of the dense model's {key} and lies in (0, 1]. "
            "Give an int for a number."
        )


def make_limit(option: str, value: float, points: Iterable[Size], dense: Size) -> Limit:
    """Create a limit on these sizes; shares are relative to the dense model's cost."""
    _require_limit(option, value)
    key, text, bound = option.partition("_")[2], f"{option}={value!r}", float(value)
    if any(getattr(p, key) is None for p in points):
        how = {
            "macs": "Give frontier(…) an example=.",
            "latency": "Use with_latency(…).",
            "accuracy": "Give frontier(…) an accuracy=.",
        }[key]
        raise OptionError(f"{text} cannot be used: this frontier has no {key}. {how}")
    if key in ("params", "macs", "bytes") and not isinstance(value, numbers.Integral):
        bound *= getattr(dense, key)
    return Limit(key, bound, text)
