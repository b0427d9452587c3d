"""Every size of a task: measured once, shown and judged by what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paper import every_size
from paper.every_size import BUDGET, ELASTIC, HEALED, NARROW, SVD, Task
from paper.scale import Scale

pytest.importorskip("sklearn")


def points(*accuracies: float) -> list[dict[str, float]]:
    """A point per seed."""
    return [{"accuracy": a, "training_macs": 1.5, "relative_macs": 0.5} for a in accuracies]


def made_up() -> dict[str, Any]:
    reached = {
        ELASTIC: (0.97, 0.90), ELASTIC + HEALED: (0.98, 0.94), SVD: (0.95, 0.80),
        SVD + HEALED: (0.96, 0.90), BUDGET: (0.98, 0.95), NARROW: (0.97, 0.96),
    }  # fmt: skip
    lines = {
        name: {"params": {"0.5": points(large), "0.15": points(small)}}
        for name, (large, small) in reached.items()
    }
    lines[NARROW]["params"]["0.1"] = points(0.9)
    lines[BUDGET]["params"]["0.1"] = []  # cannot be reached
    whole = {ELASTIC: points(0.980, 0.990), SVD: points(0.99, 0.99)}
    return {"a task": {"whole": whole, "lines": lines}}


def test_lines_are_judged_at_the_sizes_that_both_reach() -> None:
    said = every_size.judgement(made_up())
    assert "at or above narrower models at 1 of 2 sizes, at worst -1.00 pp (params 0.15×)" in said
    assert "One elastic run is at worst -5.00 pp" in said
    assert "One elastic, healed run is at worst -1.00 pp" in said
    assert "-0.50 pp beside dense" in said


def test_perplexities_are_judged_where_there_are_any() -> None:
    assert "perplexity" not in every_size.judgement(made_up())
    result = made_up()
    for name, perplexity in ((BUDGET, 5.1), (NARROW, 5.0)):
        for sizes in result["a task"]["lines"][name]["params"].values():
            for point in sizes:
                point["perplexity"] = perplexity
    said = every_size.judgement(result)
    assert "perplexity of budget runs is at worst +2.0% beside narrower models" in said


def test_the_table_has_a_row_per_size_and_says_what_training_costs() -> None:
    text = every_size.markdown(made_up())
    assert "| params 0.5× | 97.00 | 98.00 | 95.00 | 96.00 | 98.00 | 97.00 |" in text
    assert "elastic 1.50, budget 3.00, narrower 1.50, SVD 1" in text
    assert "every-size-a-task-params" in every_size.figures(made_up())


def test_a_task_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(every_size, "SHARES", (0.5, 0.3))
    task = Task("paper/lstm.yaml", (0,), {"params": (0.5,)})
    monkeypatch.setattr(every_size, "TASKS", {"an LSTM": task})
    result = every_size.measure(Scale(tmp_path, smoke=True))
    assert "training" in capsys.readouterr().err
    sizes = {name: line["params"]["0.5"] for name, line in result["an LSTM"]["lines"].items()}
    assert all(0.0 <= point["accuracy"] <= 1.0 for (point,) in sizes.values())
    assert sizes[ELASTIC] != sizes[ELASTIC + HEALED]
    assert every_size.measure(Scale(tmp_path, smoke=True)) == result
    assert "training" not in capsys.readouterr().err
