"""Results are tables: as text where they are printed, as HTML in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.text import Table


class Cells(HTMLParser):
    """Collects the texts of cells, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.inside = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def cells(html: str) -> list[list[str]]:
    parser = Cells()
    parser.feed(html)
    return parser.rows


def test_text_and_html_have_the_same_cells() -> None:
    shown = Table(("name", "count"), [("<b>", "1"), ("a & b", "22")], right=(1,), note="measured")
    assert str(shown).splitlines() == [
        "name   count",
        "─" * 12,
        "<b>        1",
        "a & b     22",
        "measured",
    ]
    assert cells(shown._repr_html_()) == [["name", "count"], ["<b>", "1"], ["a & b", "22"]]
    assert "<b>" not in shown._repr_html_() and "measured" in shown._repr_html_()


@pytest.mark.parametrize("kind", ["summary", "frontier", "latency"])
def test_results_show_themselves_in_a_notebook(kind: str) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    x = torch.randn(4, 8)
    made = {
        "summary": lambda: lod.summary(model, x),
        "frontier": lambda: lod.frontier(model, lambda m: float(m(x).square().mean())),
        "latency": lambda: lod.latency(model, x),
    }[kind]()
    header, *rows = cells(made._repr_html_())
    text = str(made).splitlines()
    assert all(word in text[0] for word in header)
    assert len(text) >= len(rows) + 2
    for line, row in zip(text[2:], rows, strict=False):
        assert all(cell in line for cell in row)
