"""Curves of quality over cost, as SVG text: no drawing library is needed to look at a frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 68, 176, 40, 56
COLOURS = ("#1f6fb4", "#d1570c", "#2b8a3e", "#8a4fbf", "#b3261e", "#6b5d2e", "#117a8b")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")  # so that curves differ without colours too


def svg(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str, across: str, up: str
) -> str:
    """Draw named curves of (cost relative to dense, quality) as one SVG document."""
    xs, ys = zip(*(point for curve in curves.values() for point in curve), strict=True)
    x_ticks, y_ticks = _ticks(0.0, max(1.0, *xs)), _ticks(min(ys), max(ys))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]

    def place(x: float, y: float) -> tuple[float, float]:
        across_share = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up_share = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            round(LEFT + across_share * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up_share * (HEIGHT - TOP - BOTTOM), 1),
        )

    for x in x_ticks:
        at, bottom = place(x, y_ticks[0])
        lines.append(f'<path d="M{at} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    for y in y_ticks:
        left, at = place(x_ticks[0], y)
        lines.append(f'<path d="M{left} {at}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{left - 8}" y="{at + 4}" text-anchor="end">{y:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>'
    )
    lines.append(
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(up)}</text>'
    )
    for i, (name, curve) in enumerate(curves.items()):
        colour, dash = COLOURS[i % len(COLOURS)], _DASHES[i % len(_DASHES)]
        places = [place(*point) for point in sorted(curve)]
        path = " ".join(f"{x},{y}" for x, y in places)
        stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        lines.append(f'<polyline points="{path}" {stroke}/>')
        lines += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in places]
        x, y = WIDTH - RIGHT + 14, TOP + 12 + 22 * i
        lines.append(f'<path d="M{x} {y - 4}h24" {stroke}/>')
        lines.append(f'<text x="{x + 32}" y="{y}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """Return four to ten round numbers that enclose a range."""
    if high - low < 1e-6 * max(1.0, abs(high)):  # one value, as far as one can see
        low, high = low - 0.5, high + 0.5
    step = 10.0 ** math.floor(math.log10(high - low))
    for divisor in (1, 2, 5, 10):
        size = step / divisor
        first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
        if last - first >= 4:
            break
    return [round(i * size, 10) for i in range(first, last + 1)]
