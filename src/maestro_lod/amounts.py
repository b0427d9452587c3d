"""How much of something, as people write it: a share as 25% or 0.25x, a count as 300k or 1.2M."""

from __future__ import annotations

import math
import re

from maestro_lod.errors import OptionError

_WRITTEN = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.)\s*([%x×]|[kKMGBT]?)[bB]?")
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_WAYS = "a share of dense as 25% or 0.25x, a count as 5000, 300k or 1.2M"


def amount_of(text: str, what: str = "") -> int | float:
    """Return an int for a count and a float for a share of the dense model, or refuse the text.

    A bare number is a share below 1 and a count above; 1 itself could be either and is refused.
    """
    shown = f"{what} {text[:40]!r}".strip()
    found = _WRITTEN.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None or not math.isfinite(float(found[1])):
        raise OptionError(f"{shown} is no amount: write {_WAYS}.")
    number, unit = float(found[1]), found[2]
    if unit in ("%", "x", "×"):
        return number / 100 if unit == "%" else number
    if not unit and number == 1:
        raise OptionError(
            f"{shown} could be all of the dense model or a single one: write 100% or 1x for the "
            "former, and leave the limit out if there is none."
        )
    if not unit and number < 1:
        return number
    count = number * _THOUSANDS[unit]
    if abs(count - round(count)) > 1e-6 * count:
        raise OptionError(f"{shown} is neither a share below 1 nor a whole count: write {_WAYS}.")
    return round(count)
