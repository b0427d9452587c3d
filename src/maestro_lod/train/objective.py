"""How ranks are made few: by a λ, a pressure that sets it, or a budget to land on."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from maestro_lod.errors import OptionError, require_nonnegative, require_whole
from maestro_lod.text import parse_size
from maestro_lod.train.method import setting


@dataclass(frozen=True)
class Pressure:
    """λ in units that mean about the same for models of one kind: a scale to search on.

    What a pressure gives is not known beforehand; where a size is wanted, take a `Budget`.
    It needs to know how long training lasts: `steps`, optimizer steps, which `fit` fills in. Where
    learning rates will change, it is the sum of their shares of the present ones.
    """

    value: float
    steps: float | None = None

    def __post_init__(self) -> None:
        if require_nonnegative("pressure", self.value) == 0.0:
            raise OptionError("pressure=0 presses nothing: give more, or penalty=0.0.")
        if self.steps is not None and require_nonnegative("steps", self.steps) == 0.0:
            raise OptionError("steps=0 must be above 0: nothing would move.")


def _amount(value: Any) -> Any:
    """Return an amount of a recipe as a number, which may be written such as 25% or 300k."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    if value is not None and not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    return parse_size(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Budget:
    """What the deployed model may cost, in params or MACs: a share of dense, or a count.

    For `steps` optimizer steps layers are trained as the dense weights that they stand for. Then
    ranks are put into order, those that lose the least within the budget are chosen over all layers
    together, and they are trained as they are: nothing is drawn and nothing penalized.
    Without `steps` `fit` takes three tenths of its run, and a loop of your own the first epoch.
    """

    kinds: ClassVar[tuple[str, ...]] = ("params", "macs")

    params: int | float | str | None = setting(
        None, "size to land on: 25%, 0.25, 300k", check=_amount
    )
    macs: int | float | str | None = setting(None, "the same of MACs", check=_amount)
    steps: int | None = setting(None, "until it is reached; 0.3 of the run")

    def __post_init__(self) -> None:
        if (self.params is None) == (self.macs is None):
            raise OptionError("a budget needs either params or macs, such as Budget(params=0.2).")
        given: Any = self._given
        if isinstance(given, str):
            given = parse_size(given, f"the budget's {self.kind}")
            object.__setattr__(self, self.kind, given)
        real = isinstance(given, numbers.Real) and not isinstance(given, bool)
        if not real or not 0 < given < math.inf or (given > 1 and given != round(given, 0)):
            raise OptionError(
                f"a budget of {self.kind}={given!r} must be a share of dense between 0 and 1, or a "
                "whole count."
            )
        if isinstance(given, float) and 1 < given <= 100:
            raise OptionError(
                f"a budget of {self.kind}={given} could be a percentage or a count: write "
                f"'{given:g}%' or {given:g}."
            )
        if self.steps is not None and require_whole("budget steps", self.steps) == 0:
            raise OptionError("budget steps=0 must be at least 1.")

    @property
    def kind(self) -> Literal["params", "macs"]:
        """What is limited: "params" or "macs"."""
        return "macs" if self.params is None else "params"

    @property
    def value(self) -> float:
        """The limit as a number: a share of dense up to 1, or a count."""
        assert self._given is not None and not isinstance(self._given, str)
        return self._given

    @property
    def _given(self) -> int | float | str | None:
        return self.macs if self.params is None else self.params

    @property
    def hint(self) -> str:
        """Return the end of an error about a count that was probably meant as a percentage."""
        percentage = 1 < self.value <= 100
        return f" Did you mean {self.kind}='{self.value:g}%'?" if percentage else ""

    def __str__(self) -> str:
        shown = self.value if self.value <= 1 else f"{int(self.value):,}"
        return f"a budget of {self.kind}={shown}"

    def limit(self, dense: int) -> int:
        """Return the limit as a count, given the cost of the dense model."""
        limit = round(self.value * dense) if self.value <= 1 else int(self.value)
        if limit >= dense:
            raise OptionError(
                f"{self} is not below the dense model's {dense:,}: nothing would have to shrink. "
                "Give a share below 1 or a smaller count."
            )
        return limit


Strength: TypeAlias = float | Pressure | Budget
"""The one choice: λ itself, or what sets it."""


def require_strength(penalty: Strength) -> Strength:
    """Return the choice as it is, or refuse what is none."""
    if isinstance(penalty, Pressure | Budget):
        return penalty
    try:
        return require_nonnegative("penalty", penalty)
    except OptionError as error:
        raise OptionError(f"{error} Or name the size: Budget(params=0.25).") from None
