"""Results of a comparison: means, winners, the front, in words, as JSON and as a page."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_lod.baselines.compare.page import page, write_page
from maestro_lod.baselines.compare.table import COSTS, Comparison, Row
from maestro_lod.cli.report.charts import log_axis


def row(method: str, size: float | None, share: float, *scores: float, **others: Any) -> Row:
    given = {"params": 1000 * share, "macs": 9000 * share, "bytes": 4000 * share} | others
    return Row(
        method=method, size=size, share=share, training=1.0, seconds=2.0, scores=scores,
        runs=("a",), latency=share / 1000, **given,
    )  # fmt: skip


def comparison(*rows: Row, **others: Any) -> Comparison:
    common: dict[str, Any] = {
        "recipe": "digits", "metric": "accuracy", "split": "test", "epochs": 3, "seeds": 2,
        "budget": None, "lr_trials": 2, "sizes": (0.5, 0.25), "missing": (),
        "dense": {"params": 1000.0, "macs": 9000.0, "bytes": 4000.0},
        "trials": {"lod": {0.1: 0.5, 0.3: None}}, "paces": {"lod": (0.1, 3)},
    }  # fmt: skip
    return Comparison(**{**common, **others}, rows=rows)


def test_a_winner_is_the_best_no_larger_than_the_size_and_the_second_another_method() -> None:
    found = comparison(
        row("lod", 0.5, 0.5, 0.90, 0.92),
        row("lod", 0.25, 0.25, 0.89, 0.91),
        row("narrow", 0.5, 0.48, 0.80, 0.82),
        row("narrow", 0.25, 0.26, 0.99, 0.99),  # missed its size
        row("dense", None, 1.0, 1.0, 1.0),
    )
    large, small = found.winners
    assert (large.size, large.row.method, large.row.mean) == (0.5, "narrow", 0.99)
    assert large.second is not None and large.second.method == "lod"
    assert small.row.method == "lod" and small.second is None and small.clear is None
    assert [winner.size for winner in found.winners] == [0.5, 0.25]


@pytest.mark.parametrize("ahead, clear", [(0.05, True), (0.02, False)])
def test_a_difference_counts_if_it_exceeds_both_deviations(ahead: float, clear: bool) -> None:
    first, second = row("a", 0.5, 0.5, 0.80, 0.82), row("b", 0.5, 0.5, 0.80 - ahead, 0.82 - ahead)
    winner = comparison(first, second).winners[0]
    assert winner.spread == pytest.approx(2 * 0.01 * 2**0.5)
    assert winner.ahead == pytest.approx(ahead)
    assert winner.clear is clear
    points = f"{100 * ahead:.2f} points"
    words = f"ahead of b by {points}, more than" if clear else f"{points} apart, not more than"
    assert f"{words} the spread" in str(comparison(first, second))


@pytest.mark.parametrize("score, scores", [(0.9, (0.9,)), (0.9, (0.9, 0.9)), (0.9, (0.88, 0.91))])
def test_a_tie_goes_to_the_smaller_model(score: float, scores: tuple[float, ...]) -> None:
    large, small = row("large", 0.5, 0.5, *[score] * len(scores)), row("small", 0.5, 0.2, *scores)
    for rows in ((large, small), (small, large)):
        found = comparison(*rows)
        assert found.winners[0].row.method == "small"
        assert "small (" in str(found) and "a tie with large" in str(found)


def test_one_seed_has_no_spread_and_the_words_say_so() -> None:
    found = comparison(row("a", 0.5, 0.5, 0.8), row("b", 0.5, 0.5, 0.7), seeds=1)
    assert found.winners[0].clear is None
    assert "one seed cannot show" in str(found)
    assert "±" not in str(found)


def test_of_perplexity_less_is_better() -> None:
    found = comparison(row("a", 0.5, 0.5, 9.0), row("b", 0.5, 0.4, 8.0), metric="perplexity")
    assert found.winners[0].row.method == "b"
    assert [each.method for each in found.front("params")] == ["b"]
    assert "ahead of a by 1" in str(found)


ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0.01, 1.0), st.floats(0.0, 1.0)), max_size=8
)


@given(rows=ROWS, kind=st.sampled_from(COSTS))
def test_the_front_has_exactly_what_nothing_beats(
    rows: list[tuple[str, float, float]], kind: str
) -> None:
    found = comparison(*(row(method, 0.5, share, score) for method, share, score in rows))
    front = found.front(kind)

    def beaten(one: Row) -> bool:
        mine = one.cost(kind)
        assert mine is not None
        return any(
            (cost := other.cost(kind)) is not None
            and cost <= mine
            and other.mean >= one.mean
            and (cost < mine or other.mean > one.mean)
            for other in found.rows
        )

    assert not any(map(beaten, front))
    for one in found.rows:
        assert beaten(one) or any(
            (f.cost(kind), f.mean) == (one.cost(kind), one.mean) for f in front
        )


def cells(text: str) -> list[list[str]]:
    """The texts of the table of all methods in a page."""
    section = text.partition("<caption>Methods by size</caption>")[2].partition("</table>")[0]
    rows = re.findall("<tr>(.*?)</tr>", section)
    return [
        [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall("<t[hd].*?</t[hd]>", r)]
        for r in rows
    ]


def test_page_and_json_agree(tmp_path: Path) -> None:
    found = comparison(
        row("lod", 0.5, 0.5, 0.90, 0.92),
        row("<b>&", 0.25, 0.25, 0.89, 0.91),
        missing=(("narrow", "has no <width>"),),
    )
    write_page(found, tmp_path)
    kept = json.loads((tmp_path / "compare.json").read_text())
    text = (tmp_path / "compare.html").read_text()
    header, *shown = cells(text)
    assert len(shown) == len(kept["rows"])
    by_name = {(line[0], line[1]): dict(zip(header, line, strict=True)) for line in shown}
    for entry in kept["rows"]:
        line = by_name[entry["method"], f"≤ {entry['size']:g}×"]
        assert line["test accuracy"].startswith(f"{100 * entry['mean']:.2f}")
        assert f"± {100 * entry['spread']:.2f}" in line["test accuracy"]
        assert line["params"].endswith(f"{entry['params'] / kept['dense']['params']:.2f}×")
        assert line["seeds"] == str(len(entry["scores"]))
        starred = line["test accuracy"].endswith("★")
        assert starred == (kept["rows"].index(entry) in kept["fronts"]["params"])
    assert "has no &lt;width&gt;" in text and "<b>&" not in text
    assert kept["missing"] == [{"what": "narrow", "reason": "has no <width>"}]
    assert Comparison.from_dict(kept) == found
    for entry in kept["winners"]:
        assert html.escape(kept["rows"][entry["row"]]["method"]) in text


def test_every_chart_has_a_mark_per_row_and_says_what_is_left_out() -> None:
    found = comparison(
        row("lod", 0.5, 0.5, 0.90, 0.92), row("svd", 0.5, 0.5, 0.2, 0.2), row("x", None, 1.0, 0.9)
    )
    text = page(found)
    charts = re.findall("<figure.*?</figure>", text)
    assert len(charts) == len(COSTS)
    for chart in charts:
        assert chart.count('class="mark') == 2
        assert "1 with much lower accuracy" in chart
    assert "20.00" in text  # in the table


def test_nothing_measured_is_a_page_too() -> None:
    empty = replace(comparison(), missing=(("lod", "diverged"),))
    assert "diverged" in page(empty)
    assert "No model could be measured." in str(empty)


@given(low=st.floats(1e-5, 1e6), ratio=st.floats(1.1, 1e6))
def test_labels_of_a_logarithmic_axis_do_not_run_into_each_other(low: float, ratio: float) -> None:
    axis = log_axis([low, low * ratio], 0.0, 100.0)
    places = [axis.at(tick) for tick in axis.ticks]
    assert places and all(b - a >= 10.0 for a, b in pairwise(places))
