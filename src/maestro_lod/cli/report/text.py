"""Numbers as readable text; an unknown number is a dash."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SPACE = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line


def plain(value: float | None) -> str:
    """Return four significant digits: 0.3142, 1e-5, 12.3 k."""
    if value is None:
        return "–"
    if abs(value) >= 9999.5:
        return quantity(value)
    return f"{value:.4g}".replace("e-0", "e-")


def quantity(value: float | None, unit: str = "") -> str:
    """Return three significant digits with a decimal prefix: 66.3 k, 1.82 G."""
    if value is None:
        return "–"
    for size, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * size:  # 999.5 k is 1 M, not 1000 k
            return f"{value / size:.3g}{_SPACE}{prefix}{unit}"
    return f"{value:.3g}{_SPACE}{unit}" if unit else f"{value:.3g}"


def times(value: float | None) -> str:
    """Return a share of the dense model: 0.23×, 0.012×."""
    if value is None:
        return "–"
    return f"{value:.2f}×" if value >= 0.095 else f"{value:.2g}×"


def of_dense(value: float | None, relative: float | None) -> str:
    """Return a cost and its share of that of the dense model: 66.3 k · 0.23×."""
    return quantity(value) if relative is None else f"{quantity(value)} · {times(relative)}"


def percent(value: float | None) -> str:
    """Return a share as a percentage: 98.91 %."""
    return "–" if value is None else f"{100 * value:.2f}{_SPACE}%"


def percent_tick(value: float) -> str:
    """Return a percentage as the label of an axis: 98.5 %."""
    return f"{100 * value:.4g}{_SPACE}%"


def duration(seconds: float | None) -> str:
    """Return a time in a suitable unit: 1.7 ms, 12.3 s, 4.1 min, 2.5 h."""
    if seconds is None:
        return "–"
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g}{_SPACE}{unit}"
    return f"{1000 * seconds:.3g}{_SPACE}ms"
