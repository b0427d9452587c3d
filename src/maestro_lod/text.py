"""Text for people: tables, HTML, sizes such as 25% or 1.2M, and how to install an extra."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from urllib.parse import urlparse
from urllib.request import url2pathname

from maestro_lod.errors import OptionError

# -- HTML and SVG --------------------------------------------------------------------------------

_VOID = {"input", "link", "meta", "wbr"}


class Markup(str):
    """Escaped markup; `tag` and `joined` escape every other text."""

    __slots__ = ()


def joined(*parts: str | None) -> Markup:
    """Concatenate parts, escaping those that are not markup; None is left out."""
    return Markup(
        "".join(
            part if isinstance(part, Markup) else html.escape(part)
            for part in parts
            if part is not None
        )
    )


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return one element; `class_` means class, `aria_label` aria-label, None is left out."""
    opening = name
    for key, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
            opening += f' {key.rstrip("_").replace("_", "-")}="{html.escape(text)}"'
    return Markup(f"<{opening}>" if name in _VOID else f"<{opening}>{joined(*children)}</{name}>")


# -- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows under a header; the columns in `right` are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    note: str = ""

    def __str__(self) -> str:
        rows = (self.header, *self.rows)
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.header))]
        lines = [
            "  ".join(
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "─" * max(map(len, lines)))
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        def row(kind: str, cells: Sequence[str]) -> str:
            sides = ("right" if i in self.right else "left" for i in range(len(cells)))
            styled = zip(cells, sides, strict=True)
            return tag("tr", *(tag(kind, c, style=f"text-align:{side}") for c, side in styled))

        head = tag("thead", row("th", self.header))
        body = tag("tbody", *(row("td", cells) for cells in self.rows))
        note = tag("p", self.note) if self.note else None
        return tag("div", tag("table", head, body), note)


class Tabular:
    """Base of values that print as a table, and appear as one in notebooks."""

    def table(self) -> Table:
        """Return the table of this value."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """Lay out rows under a header as text."""
    return str(Table(header, rows, right))


# -- sizes ---------------------------------------------------------------------------------------

_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.)\s*([%x×]|[kKMGBT]?)[bB]?")
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_WAYS = "a share of the dense model as 25% or 0.25x, or a count as 5000, 300k or 1.2M"


def parse_size(text: str, option: str = "") -> int | float:
    """Parse a size: 25% or 0.25x is a share, 300k or 1.2M a count.

    Args:
        text: The size. A bare number is a share below 1 and a count above; 1 itself could be
            either and is refused.
        option: The name of the option, for error messages.

    Returns:
        An int for a count, a float for a share of the dense model.

    Raises:
        OptionError: If the text is not a size, or could mean two sizes.
    """
    quoted = f"{option} {text[:40]!r}".strip()
    match = _SIZE.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None or not math.isfinite(float(match[1])):
        raise OptionError(f"{quoted} is not a size. Write {_WAYS}.")
    number, unit = float(match[1]), match[2]
    if unit in ("%", "x", "×"):
        return number / 100 if unit == "%" else number
    if not unit and number == 1:
        raise OptionError(
            f"{quoted} could mean all of the dense model or a single one. Write 100% or 1x for the "
            "whole model; leave the limit out for no limit."
        )
    if not unit and number < 1:
        return number
    count = number * _THOUSANDS[unit]
    if abs(count - round(count)) > 1e-6 * count:
        raise OptionError(f"{quoted} is neither a share below 1 nor a whole count. Write {_WAYS}.")
    return round(count)


# -- installing ----------------------------------------------------------------------------------

_NAME = "maestro-lod"


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra, from the source of this installation."""
    place, editable = _installation()
    return f"pip install {'--editable ' if editable else ''}'{place}[{extra}]'"


def _installation() -> tuple[str, bool]:
    """Return the recorded source of the installation, and whether it is editable."""
    try:
        text = metadata.distribution(_NAME).read_text("direct_url.json")
        record = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return _NAME, False
    url = urlparse(str(record.get("url", "")))
    if url.scheme != "file":
        return _NAME, False
    return url2pathname(url.path), bool(record.get("dir_info", {}).get("editable"))
