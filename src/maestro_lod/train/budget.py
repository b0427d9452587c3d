"""The budget of a recipe: the size that a model is trained for."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from maestro_lod.errors import OptionError
from maestro_lod.text import parse_size
from maestro_lod.train.method import setting


def _amount(value: Any) -> Any:
    """Return an amount of a recipe as a number; it may be written such as 25% or 300k."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    if value is not None and not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    return parse_size(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Budget:
    """The limit of the deployed model in params or MACs: a share of dense, or a count.

    A recipe trains for it by `Elastic(sizes=[limit])`.
    """

    kinds: ClassVar[tuple[str, ...]] = ("params", "macs")

    params: int | float | str | None = setting(
        None, "size to reach: 25%, 0.25, 300k", check=_amount
    )
    macs: int | float | str | None = setting(None, "the same of MACs", check=_amount)

    def __post_init__(self) -> None:
        if (self.params is None) == (self.macs is None):
            raise OptionError("a budget needs either params or macs, such as params=0.2.")
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

    @property
    def kind(self) -> Literal["params", "macs"]:
        """The limited quantity: "params" or "macs"."""
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
