"""Exceptions of the library, nearest-name suggestions, and checks of arguments.

Every message names the fault, the value and the way out.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable


class MaestroError(Exception):
    """Base class of all errors that this library raises."""


class LayerError(MaestroError, ValueError):
    """A layer, pattern or model cannot be used in the requested way."""


class RankError(MaestroError, ValueError):
    """A layer cannot have the requested rank."""


class OptionError(MaestroError, ValueError):
    """An option has an invalid value."""


class BusyError(OptionError):
    """Another process is working in the directory."""


class TrainingError(MaestroError, RuntimeError):
    """Training diverged, or would have no effect."""


class CheckpointError(MaestroError, RuntimeError):
    """A file is damaged, was written by another program, or holds another model."""


class OutputError(CheckpointError):
    """The outputs of an exported file differ from those of the model."""


class DataError(MaestroError, RuntimeError):
    """Data is missing, damaged, or differs from what its name implies."""


def listed(names: Iterable[str], most: int = 6) -> str:
    """Join names for a message; a list longer than `most` is cut and ends with its length."""
    texts = [name or "(the model itself)" for name in names]
    if len(texts) <= most:
        return ", ".join(texts) if texts else "none"
    return f"{', '.join(texts[:most])}, … ({len(texts)})"


def suggest(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean …?" with the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_nonnegative(option: str, value: float) -> float:
    """Return the value as a float; raise OptionError if it is negative, NaN or infinite."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0.0 <= float(value) < float("inf"):
        raise OptionError(f"{option}={value!r} must be a finite number that is zero or larger.")
    return float(value)


def require_whole(option: str, value: int) -> int:
    """Return the value; raise OptionError if it is not an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise OptionError(f"{option}={value!r} must be a whole number, zero or larger.")
    return int(value)


def require_seed(value: int) -> int:
    """Return a seed; raise OptionError if torch's generators cannot take it."""
    if require_whole("seed", value) >= 2**63:
        raise OptionError(f"seed={value!r:.40} must be less than 2**63.")
    return int(value)


def require_bool(option: str, value: bool) -> bool:
    """Return the value; raise OptionError if it is not a bool, since any text would be true."""
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} must be True or False.")
    return value


def require_at_least_one(option: str, value: int, meaning: str) -> int:
    """Return the value; raise OptionError if it is not an integer of at least 1."""
    if require_whole(option, value) == 0:
        raise OptionError(f"{option}=0 must be at least 1: {meaning}.")
    return int(value)
