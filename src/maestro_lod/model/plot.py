"""SVG charts without a drawing library.

Shapes have style classes; `svg` includes a style, pages define their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from maestro_lod.text import Markup, joined, tag

COLOURS = ("#0067b0", "#c4460a", "#00795a", "#a2307c", "#8a6100", "#5b4bc4", "#4a5666")
_DASHES = (None, "7 3", "2 3", "9 3 2 3")  # so that curves differ without colours too
_STYLE = (
    "text{fill:#222}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#e4e4e4}"
    ".axis{stroke:#666}.line{fill:none;stroke:currentColor;stroke-width:2}.step{fill:currentColor}"
) + "".join(f".s{series}{{color:{value}}}" for series, value in enumerate(COLOURS))

Format = Callable[[float], str]
Points = Sequence[tuple[float, float]]


def colour(series: int) -> str:
    """Return the style class with the colour of a series."""
    return f"s{series % len(COLOURS)}"


@dataclass(frozen=True)
class Axis:
    """An axis: its range of values, its pixels, and the round values to label."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """Return an axis with round values at its ends."""
    low, high = spread(values)
    step = round_up((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(k * step for k in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks)


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and largest value, moved apart if they are equal."""
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        around = 0.02 * abs(low) or 0.5
        return low - around, high + around
    return low, high


def round_up(value: float) -> float:
    """Round up to the next of … 0.1, 0.2, 0.5, 1, 2, 5, 10 …."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


@dataclass(frozen=True)
class Frame:
    """The size of a chart and the margins for its texts, in units of the chart."""

    width: float
    height: float
    left: float = 58
    right: float = 14
    top: float = 20
    bottom: float = 28

    @property
    def across(self) -> tuple[float, float]:
        return self.left, self.width - self.right

    @property
    def up(self) -> tuple[float, float]:
        return self.height - self.bottom, self.top


def grid(
    frame: Frame, x: Axis, y: Axis, show_x: Format, show_y: Format, corner: str | None = None
) -> Markup:
    """Draw a line for each round value of y, and label both axes; `corner` names the x axis."""
    left, right = frame.across
    bottom = frame.up[0]
    parts: list[Markup] = []
    for tick in y.ticks:
        height = y.at(tick)
        parts.append(tag("path", class_="grid", d=f"M{left} {height:.1f}H{right}"))
        parts.append(tag("text", show_y(tick), class_="end", x=left - 7, y=height + 4))
    if corner is not None:
        parts.append(tag("text", corner, class_="end", x=left - 7, y=bottom + 19))
    for tick in x.ticks:
        place = x.at(tick)
        shifted = corner is not None and place < left + 20  # or it would cover the name
        kind = None if shifted else "middle"
        parts.append(tag("text", show_x(tick), class_=kind, x=place, y=bottom + 19))
    parts.append(tag("path", class_="axis", d=f"M{left} {bottom}H{right}"))
    return joined(*parts)


def dotted_line(
    points: Points, x: Axis, y: Axis, series: int, *, radius: float, dash: str | None = None
) -> Markup:
    """Draw points as dots joined by a line."""
    places = [(x.at(across), y.at(up)) for across, up in points]
    path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    line = tag("path", class_=f"line {colour(series)}", d=f"M{path}", stroke_dasharray=dash)
    dot = f"step {colour(series)}"
    return joined(line, *(tag("circle", class_=dot, r=radius, cx=a, cy=b) for a, b in places))


def svg(curves: Mapping[str, Points], *, title: str, across: str, up: str) -> str:
    """Draw named curves of (across, up) as one SVG document; the axis across begins at zero."""
    frame = Frame(720, 440, left=68, right=176, top=40, bottom=56)
    xs, ys = zip(*(point for curve in curves.values() for point in curve), strict=True)
    x, y = linear_axis([0.0, 1.0, *xs], *frame.across), linear_axis(ys, *frame.up)
    aside = f"translate(18 {(y.start + y.end) / 2:.1f}) rotate(-90)"
    drawn = [
        tag("title", title),
        tag("style", Markup(_STYLE)),
        tag("rect", width=frame.width, height=frame.height, fill="#fff"),
        tag("text", title, x=x.start, y=24, font_size=15, font_weight="bold"),
        grid(frame, x, y, "{:g}".format, "{:g}".format),
        tag("text", across, class_="middle", x=(x.start + x.end) / 2, y=frame.height - 12),
        tag("text", up, class_="middle", transform=aside),
    ]
    for i, (name, curve) in enumerate(curves.items()):
        dash, left, height = _DASHES[i % len(_DASHES)], x.end + 14, frame.top + 12 + 22 * i
        sample = f"M{left} {height - 4}h24"
        drawn += [
            dotted_line(sorted(curve), x, y, i, radius=2, dash=dash),
            tag("path", class_=f"line {colour(i)}", d=sample, stroke_dasharray=dash),
            tag("text", name, x=left + 32, y=height),
        ]
    size = f"0 0 {frame.width} {frame.height}"
    font = {"font_family": "sans-serif", "font_size": "13"}
    xmlns = "http://www.w3.org/2000/svg"
    return tag("svg", *drawn, xmlns=xmlns, viewBox=size, role="img", **font) + "\n"
