"""Tables for people who print a result, or look at it in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maestro_lod.markup import tag


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
    """What is shown as its table, wherever it is shown."""

    def table(self) -> Table:
        """Return what to show."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """Lay out rows under a header as text."""
    return str(Table(header, rows, right))
