"""One exception family: every message names the thing, the value and the way out."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable


class MaestroError(Exception):
    """Base of every error that this library raises on purpose."""


class LayerError(MaestroError, ValueError):
    """A layer, pattern or model that cannot be used as asked."""


class RankError(MaestroError, ValueError):
    """A rank that the layer cannot have."""


class OptionError(MaestroError, ValueError):
    """An option with a value that makes no sense."""


class BusyError(OptionError):
    """A directory that another process works in."""


class TrainingError(MaestroError, RuntimeError):
    """Training that would silently do nothing or has gone wrong."""


class CheckpointError(MaestroError, RuntimeError):
    """A file that is damaged, foreign, or of another model."""


class OutputError(CheckpointError):
    """A file that does not compute what the model does."""


class DataError(MaestroError, RuntimeError):
    """Data that is missing, damaged, or not what its name says."""


def listed(names: Iterable[str], most: int = 6) -> str:
    """Join names for a message; a long list is cut and counted, the model itself is spelled out."""
    shown = [name or "(the model itself)" for name in names]
    if len(shown) <= most:
        return ", ".join(shown) if shown else "none"
    return f"{', '.join(shown[:most])}, … ({len(shown)})"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_nonnegative(option: str, value: float) -> float:
    """Return the value as a float, or refuse what is no number, negative, NaN or infinite."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0.0 <= float(value) < float("inf"):
        raise OptionError(f"{option}={value!r} must be a finite number that is zero or larger.")
    return float(value)


def require_whole(option: str, value: int) -> int:
    """Return the value, or refuse one that is not a whole number, zero or larger."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise OptionError(f"{option}={value!r} must be a whole number, zero or larger.")
    return int(value)


def require_seed(value: int) -> int:
    """Return a seed, or refuse one that torch's generators cannot take."""
    if require_whole("seed", value) >= 2**63:
        raise OptionError(f"seed={value!r:.40} must be less than 2**63.")
    return int(value)


def require_bool(option: str, value: bool) -> bool:
    """Return the value, or refuse what is neither True nor False: any text would count as true."""
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} must be True or False.")
    return value


def require_at_least_one(option: str, value: int, meaning: str) -> int:
    """Return the value, or refuse one that is not a whole number above zero."""
    if require_whole(option, value) == 0:
        raise OptionError(f"{option}=0 must be at least 1: {meaning}.")
    return int(value)
