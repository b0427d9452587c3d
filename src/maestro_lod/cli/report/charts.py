"""Charts as SVG that work without a script; texts for hovering are attached as data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maestro_lod.cli.report.text import plain, quantity
from maestro_lod.model import plot
from maestro_lod.model.plot import Axis, Format, Frame, colour
from maestro_lod.text import Markup, joined, tag

# six shapes and seven colours have no common factor, so that 42 runs look different
_SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5.2L5 3.8H-5z",
    "M0 -5.8L5.2 0L0 5.8L-5.2 0z",
    "M0 5.2L5 -3.8H-5z",
    "M-1.7 -5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
)


_LABEL = 0.11  # share of the axis that a label needs


def epoch_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """Return an axis from the first to the last epoch with whole numbers as labels."""
    low, high = plot.spread(values)
    step = max(1, round(plot.round_up((high - low) / 6)))
    ticks = tuple(step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low, high, start, end, ticks)


def log_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """Return a logarithmic axis for positive values, with a margin at both ends."""
    known = list(values)
    margin = max((max(known) / min(known)) ** 0.06, 1.1)
    low, high = min(known) / margin, max(known) * margin
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        every = max(1, len(decades) // 5) if digits == (1,) else 1
        ticks = [d * 10.0**k for k in decades[::every] for d in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    else:  # a short range, on which a logarithm is almost linear
        ticks = [tick for tick in plot.linear_axis((low, high), 0, 1).ticks if low <= tick <= high]
    return Axis(low, high, start, end, tuple(_apart(ticks, low, high)), log=True)


def _apart(ticks: Iterable[float], low: float, high: float) -> list[float]:
    """Drop values whose labels would overlap the previous one on a logarithmic axis."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= _LABEL * math.log(high / low):
            kept.append(tick)
    return kept


WIDE = Frame(480, 270)
SMALL = Frame(350, 220)


@dataclass(frozen=True)
class Line:
    """Curve of (epoch, value) pairs, with a gap where the value is None."""

    name: str
    points: Sequence[tuple[float, float | None]]
    series: int
    faint: bool = False
    """Draw it thin and dashed: training data, if there is validation data."""

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(epoch, value) for epoch, value in self.points if value is not None]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    show: Format,
    tick: Format = plain,
    note: str | None = None,
    references: Mapping[str, float] | None = None,
    from_zero: bool = False,
    frame: Frame = WIDE,
) -> Markup | None:
    """Draw curves over epochs, on a logarithmic scale for a wide range; None without values."""
    lines = [line for line in lines if line.known]
    if not lines:
        return None
    values = [value for line in lines for _, value in line.known]
    x = epoch_axis((epoch for line in lines for epoch, _ in line.known), *frame.across)
    if not from_zero and min(values) > 0 and max(values) / min(values) > 30:
        y, note = log_axis(values, *frame.up), f"{note} · log scale" if note else "log scale"
    else:
        ends = [*([0.0] if from_zero else []), *(references or {}).values()]
        y = plot.linear_axis([*values, *ends], *frame.up)
    drawn = [plot.grid(frame, x, y, plain, tick, corner="epoch")]
    for label, value in (references or {}).items():
        height = y.at(value)
        drawn.append(tag("path", class_="reference", d=f"M{x.start} {height:.1f}H{x.end}"))
        drawn.append(tag("text", label, class_="end", x=x.end, y=height - 5))
    drawn += [_curve(line, x, y) for line in lines]
    rows: dict[float, list[tuple[str, str, str, float]]] = {}
    for line in lines:
        for epoch, value in line.known:
            row = (colour(line.series), line.name, show(value), round(y.at(value), 1))
            rows.setdefault(epoch, []).append(row)
    hits = [(round(x.at(epoch), 1), f"Epoch {epoch:g}", rows[epoch]) for epoch in sorted(rows)]
    texts = [f"{n.name}: from {show(n.known[0][1])} to {show(n.known[-1][1])}." for n in lines]
    summary = " ".join([f"{title} over epochs.", *texts])
    return _figure(title, note, joined(*drawn), frame, summary, {"by": "x", "hits": hits})


@dataclass(frozen=True)
class Dot:
    """One model in a plane of cost and quality; `rows` are shown on hovering."""

    name: str
    x: float
    y: float
    series: int
    rows: Sequence[tuple[str, str]]
    hollow: bool = False
    scale: float = 1.35
    """Size of its mark."""
    spread: float | None = None
    """Standard deviation of the quality, drawn as a vertical line."""


def plane(
    title: str,
    dots: Sequence[Dot],
    *,
    kind: str,
    show: Format,
    tick: Format,
    note: str | None = None,
    curve: Sequence[Dot] = (),
    front: Sequence[Dot] = (),
    show_x: Format = quantity,
) -> Markup | None:
    """Draw models by a cost, on a logarithmic axis, and their quality.

    `curve` are dots joined by a line; `front` are the dots that no other beats, joined by steps.
    """
    everything = [*curve, *dots]
    if not everything:
        return None
    x = log_axis((dot.x for dot in everything), *WIDE.across)
    ends = [dot.y + side * (dot.spread or 0.0) for dot in everything for side in (-1, 1)]
    y = plot.linear_axis(ends, *WIDE.up)
    x_name = "MACs" if kind == "macs" else kind
    drawn = [plot.grid(WIDE, x, y, show_x, tick, corner=x_name)]
    if curve:
        points = [(dot.x, dot.y) for dot in curve]
        drawn.append(plot.dotted_line(points, x, y, curve[0].series, radius=3))
    if front:
        drawn.append(_steps(front, x, y))
    drawn += [_dot(dot, x, y) for dot in dots]
    hits = []
    for dot in everything:
        across, up = round(x.at(dot.x), 1), round(y.at(dot.y), 1)
        hits.append((across, dot.name, [(colour(dot.series), *row, up) for row in dot.rows]))
    texts = [f"{dot.name}: {show(dot.y)} at {show_x(dot.x)} {x_name}." for dot in everything]
    content = {"by": "xy", "hits": hits, "x": [kind, x.low, x.high, x.start, x.end]}
    return _figure(title, note, joined(*drawn), WIDE, " ".join([f"{title}.", *texts]), content)


def _dot(dot: Dot, x: Axis, y: Axis) -> Markup:
    """Draw a dot, with a vertical line for its spread if it has one."""
    drawn = marker(dot.series, x.at(dot.x), y.at(dot.y), hollow=dot.hollow, scale=dot.scale)
    if not dot.spread:
        return drawn
    low, high = y.at(dot.y - dot.spread), y.at(dot.y + dot.spread)
    whisker = f"M{x.at(dot.x):.1f} {low:.1f}V{high:.1f}"
    return joined(tag("path", class_=f"line {colour(dot.series)}", d=whisker), drawn)


def _steps(front: Sequence[Dot], x: Axis, y: Axis) -> Markup:
    """Draw the best quality at each cost as steps to the right end."""
    steps = f"M{x.at(front[0].x):.1f} {y.at(front[0].y):.1f}"
    for dot in front[1:]:
        steps += f"H{x.at(dot.x):.1f}V{y.at(dot.y):.1f}"
    return tag("path", class_="reference", d=f"{steps}H{x.end:.1f}", fill="none")


def marker(series: int, x: float, y: float, *, hollow: bool = False, scale: float = 1.0) -> Markup:
    """Draw the mark of a run: a colour and a shape, so that either suffices."""
    return tag(
        "path",
        class_=f"mark {colour(series)}{' hollow' if hollow else ''}",
        d=_SHAPES[series % len(_SHAPES)],
        transform=f"translate({x:.1f} {y:.1f}) scale({scale:g})",
    )


def badge(series: int) -> Markup:
    """Draw the mark of a run for use in a text."""
    return tag(
        "svg", marker(series, 0, 0), class_="badge", viewBox="-6 -6 12 12", aria_hidden="true"
    )


def _curve(line: Line, x: Axis, y: Axis) -> Markup:
    """Draw a curve with the mark of its run at the end."""
    steps, pen_up, place = [], True, (0.0, 0.0)
    for epoch, value in line.points:
        if value is None:
            pen_up = True
            continue
        place = (x.at(epoch), y.at(value))
        # h0 draws a value without neighbours as a dot
        steps.append(f"{'M' if pen_up else 'L'}{place[0]:.1f} {place[1]:.1f}" + "h0" * pen_up)
        pen_up = False
    kind = "line faint" if line.faint else "line"
    return joined(
        tag("path", class_=f"{kind} {colour(line.series)}", d="".join(steps)),
        None if line.faint else marker(line.series, *place),
    )


def _figure(
    title: str,
    note: str | None,
    picture: Markup,
    frame: Frame,
    summary: str,
    content: Mapping[str, object],
) -> Markup:
    picture = tag(
        "svg",
        picture,
        viewBox=f"0 0 {frame.width} {frame.height}",
        role="img",
        aria_label=summary,
    )
    caption = tag("figcaption", tag("b", title), tag("span", note) if note else None)
    drawing = tag("div", picture, data({**content, "y": frame.up}), class_="plot")
    return tag("figure", caption, drawing, class_="wide" if frame is WIDE else None)


def data(content: Any) -> Markup:
    """Return data for the script; `<` is escaped so that no text ends the element."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json")
