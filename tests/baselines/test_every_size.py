"""Every size of a task: trained once, stored, shown and judged by what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paper import every_size, every_size_cells
from paper.every_size import BUDGET, DENSE, DISTILLED, ELASTIC, NARROW, OLD_BUDGET
from paper.every_size_cells import Cells, Task
from paper.scale import Scale

pytest.importorskip("sklearn")


def seeds(*accuracies: float) -> dict[str, dict[str, float]]:
    """A point per seed."""
    return {
        str(seed): {"accuracy": a, "macs": 50, "training_macs": 0.7, "seconds": 10.0}
        for seed, a in enumerate(accuracies)
    }


def made_up() -> dict[str, Any]:
    reached = {
        ELASTIC: ((0.970, 0.972), (0.90, 0.91)), NARROW: ((0.960, 0.962), (0.96, 0.96)),
        OLD_BUDGET: ((0.971, 0.973), (0.95, 0.95)), BUDGET: ((0.97, 0.97), (0.95, 0.95)),
    }  # fmt: skip
    lines = {
        name: {"0.5": seeds(*large), "0.15": seeds(*small)}
        for name, (large, small) in reached.items()
    }
    lines[NARROW]["0.1"] = seeds(0.9)
    whole = {**seeds(0.98, 0.98)["0"], "macs": 100, "training_macs": 1.4}
    lines[ELASTIC]["whole"] = {"0": whole, "1": whole}
    lines[DENSE] = {"whole": {"0": {**whole, "accuracy": 0.985}, "1": {**whole, "accuracy": 0.98}}}
    return {"a task": {"tested": 10_000, "epochs": 20, "lines": {"params": lines}}}


def test_lines_are_judged_at_the_sizes_that_both_reach() -> None:
    said = every_size.judgement(made_up())
    assert "against `narrower`: 1 of 1 points above, 0 equal" in said
    assert "against `narrower, distilled`: not measured" in said
    assert "against `budget before`: 0 of 1 points above, 1 equal within the standard error" in said
    assert "Its whole model is at worst -0.25 ± 0.32 pp relative to `dense` (a task)" in said
    assert "It costs at most 1.40 dense trainings in MACs (a task)" in said
    assert "It takes at most 1.00 times as long" in said


def test_a_standard_error_has_the_seeds_and_the_samples() -> None:
    of = made_up()["a task"]
    gap = every_size._gap(of, "params", ELASTIC, NARROW, "0.15")
    assert gap is not None
    samples = 1e4 * (0.905 * 0.095 + 0.96 * 0.04) / 10_000
    assert gap == pytest.approx((-5.5, (0.5 + samples - 0.25) ** 0.5), abs=0.2)
    assert every_size._gap(of, "params", ELASTIC, DISTILLED, "0.5") is None


def test_perplexities_are_judged_where_there_are_any() -> None:
    assert "perplexity" not in every_size.judgement(made_up())
    result = made_up()
    lines = result["a task"]["lines"]["params"]
    lines[DISTILLED] = {"0.5": seeds(0.97, 0.97)}
    for name, perplexity in ((ELASTIC, 5.1), (DISTILLED, 5.0)):
        for point in lines[name]["0.5"].values():
            point["perplexity"] = perplexity
    assert "perplexity from 0.25 up is at most +2.0% of" in every_size.judgement(result)


def test_the_table_has_a_row_per_size_and_says_what_training_costs() -> None:
    text = every_size.markdown(made_up())
    assert "| 0.5× | 97.10 | 97.00 (+0.10 ±" in text
    assert "| 0.1× | – | – | 90.00 | – |" in text
    assert "| elastic | 1.40 | 10 |" in text and "| narrower | 1.50 | 30 |" in text
    assert {"every-size-a-task-params", "accuracy-against-size"} <= {*every_size.figures(made_up())}


def test_cells_that_are_stored_are_not_trained_again(tmp_path: Path) -> None:
    cells = Cells(Scale(tmp_path), "lenet", 0)
    point = {"accuracy": 0.5, "params": 3, "macs": 4}
    cells.file("budget").parent.mkdir()
    stored = {str(share): point for share in every_size_cells.SHARES}
    cells.file("budget").write_text(json.dumps(stored))
    assert cells.points("budget") == stored
    with pytest.raises(SystemExit, match="no line 'bugdet'"):
        cells.points("bugdet")


@pytest.mark.slow
def test_a_task_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (every_size, every_size_cells):
        monkeypatch.setattr(module, "SHARES", (0.5,))
    monkeypatch.setitem(every_size_cells.TASKS, "lenet", Task("an LSTM", "paper/lstm.yaml"))
    lines = {"elastic": ("whole", "0.5"), "dense": ("whole",), "long": ("whole",)}
    each = dict.fromkeys(("budget", "narrower", "distilled"), ("0.5",))
    monkeypatch.setattr(every_size_cells, "LINES", {**lines, **each, "elastic-macs": ()})
    result = every_size.measure(Scale(tmp_path, smoke=True))
    assert "training" in capsys.readouterr().err
    found = result["an LSTM"]["lines"]["params"]
    for name in (ELASTIC, BUDGET, NARROW, DISTILLED):
        assert 0.0 <= found[name]["0.5"]["0"]["accuracy"] <= 1.0
    assert every_size.measure(Scale(tmp_path, smoke=True)) == result
    assert "training" not in capsys.readouterr().err
    assert every_size.measure(Scale(tmp_path))["an LSTM"]["lines"]["params"][ELASTIC]
