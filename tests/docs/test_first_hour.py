"""The five first tasks train to a quarter as their page says, and its table is the measured one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    return runpy.run_path(str(ROOT / "benchmarks" / "first_hour.py"))


@pytest.mark.slow
def test_a_task_lands_on_a_quarter_from_an_empty_folder(script: dict[str, Any]) -> None:
    run = script["trained"]("forest", [*script["WAYS"]["budget"], "epochs=4"])
    assert 0.2 < run["relative_params"] <= 0.25
    assert run["test"]["accuracy"] > 0.5  # of seven kinds


def test_the_table_is_made_from_the_results(script: dict[str, Any]) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "first_hour.json").read_text())["answer"]
    assert [*kept] == script["tasks"]()
    for ways in kept.values():
        assert all(len(ways[way]) == script["SEEDS"] for way in script["WAYS"])
    table = script["START"] + script["table"](kept) + script["END"]
    assert table in (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
