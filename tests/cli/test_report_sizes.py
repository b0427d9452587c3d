"""The sizes in a report: those one would deploy, by what they are, with what was measured."""

from __future__ import annotations

from typing import Any

from maestro_lod.cli.report.frontier import Sizes, _Chart


def point(macs: int, params: int, accuracy: float, latency: float = 1.0) -> dict[str, Any]:
    return {
        "ranks": {"a": 1}, "loss": 1 - accuracy, "accuracy": accuracy, "params": params,
        "macs": macs, "bytes": 4 * params, "latency": latency,
    }  # fmt: skip


DENSE = point(100, 100, 0.9)
POINTS = [
    point(80, 90, 0.9), point(60, 95, 0.8), point(50, 50, 0.85), point(40, 60, 0.7),
    point(30, 55, 0.75), point(10, 20, 0.1),
]  # fmt: skip


def sizes(**changes: Any) -> Sizes:
    about = {"loss": "training", "accuracy": "validation"}
    found = Sizes.of({"points": POINTS, "dense": DENSE, "measured_on": about, **changes})
    assert found is not None
    return found


def test_sizes_that_another_beats_or_that_are_of_no_use_are_hidden() -> None:
    assert [p["macs"] for p in sizes().points] == [30, 50, 80]
    assert sizes().hidden == 3
    hidden = "3 more in frontier.json are not shown: another size is at least as good and as small"
    assert hidden in sizes().remarks()


def test_a_size_that_is_best_by_one_cost_alone_is_off_the_line_of_the_other() -> None:
    chart = _Chart.of(sizes(), "params")
    assert [p["params"] for p in chart.line] == [50, 90]
    assert [p["params"] for p in chart.others] == [55]
    assert chart.places == [2, 0, 1]


def test_sizes_are_named_by_their_share_of_the_dense_form() -> None:
    assert [sizes().name(p) for p in sizes().points] == ["0.30× MACs", "0.50× MACs", "0.80× MACs"]


def test_quality_says_on_which_data() -> None:
    quality = [fact.name for fact in sizes().facts if not fact.is_cost]
    assert quality == ["validation accuracy", "training loss"]
    assert "measured on validation data, never on test data" in sizes().remarks()
    older = sizes(measured_on=None)
    assert next(fact.name for fact in older.facts) == "accuracy"
    assert "validation" not in older.remarks()


def test_latency_that_is_the_same_for_all_is_explained_and_other_is_not() -> None:
    assert "No layer is faster factored" in sizes().remarks()
    faster = [*POINTS[1:], point(80, 90, 0.9, latency=0.5)]
    assert "No layer is faster factored" not in sizes(points=faster).remarks()
    assert "not a model that was trained dense" in sizes().remarks()
