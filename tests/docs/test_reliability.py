"""docs/reliability.md: tables that follow from results, tests that exist, a sample of the soak."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "reliability.md").read_text()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return runpy.run_path(str(ROOT / "benchmarks" / "reliability.py"))


def test_the_tables_are_those_of_the_results(script: dict[str, object]) -> None:
    assert script["documented"](DOCS) == DOCS  # type: ignore[operator]


def test_what_was_counted_is_as_much_as_promised() -> None:
    results = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["answer"]
        for name in ("soak", "soak_commands", "damage", "locks", "hostile", "threads")
    }
    for name, least in (("soak", 1000), ("soak_commands", 500)):
        assert sum(results[name]["kills"].values()) >= least
        assert results[name]["failures"] == []
    commands = {"compress", "heal", "deploy", "tune", "compare"}
    assert set(results["soak_commands"]["kills"]) == commands
    assert sum(sum(ends.values()) for ends in results["hostile"].values()) >= 1000
    assert not any(ends.get("failed") for ends in results["hostile"].values())
    assert results["threads"] == {"answers": 10_000, "of a wrong size": 0}
    for what, least in (("flipped bits", 10_000), ("damaged files", 2_000)):
        ends = results["damage"][what].values()
        assert sum(sum(end.values()) for end in ends) >= least
        assert not any(end.get("silently something else") for end in ends)
    assert [sum(ends.values()) for ends in results["locks"].values()] == [50, 50]


def test_what_was_found_fails_on_the_code_before_and_holds_now() -> None:
    told = json.loads((ROOT / "benchmarks" / "results" / "findings.json").read_text())
    rows = told["answer"]["rows"]
    for review, last in (("3ab0e5b", 13), ("39eaffd", 27)):
        assert {row["finding"] for row in rows if row["review"] == review} == {*range(1, last + 1)}
    assert all(row["before"] != "holds" and row["after"] == "holds" for row in rows)


def test_every_program_that_shows_a_fault_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runpy.run_path(str(ROOT / "benchmarks" / "findings.py"))
    probes = sys.modules["probes"].PROBES
    told = json.loads((ROOT / "benchmarks" / "results" / "findings.json").read_text())
    rows = told["answer"]["rows"]
    assert [(row["title"], row["test"]) for row in rows] == [
        (title, probe.test) for title, probe in probes.items()
    ]


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", DOCS)
    assert len(named) > 20 and not re.search(r"`test_\w+\.py", DOCS)
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not test or test in tests, f"{file}::{test}"


@pytest.mark.slow
def test_a_sample_of_the_soak() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "8", "--sample", "--seed", "3"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["failures"] == [] and sum(counts["kills"].values()) >= 8
