"""The notebook runs from its first cell to its last, and shows results as tables."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import maestro_lod as lod

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def cells() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in content if cell["cell_type"] == "code"]


def shown_by(code: str, names: dict[str, Any]) -> Any:
    """Run a cell and return what its last line is, as a notebook does."""
    *lines, last = ast.parse(code).body
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


def test_every_cell_runs_and_shows_what_is_stored_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    tables = 0
    for cell in cells():
        shown = shown_by("".join(cell["source"]), names)
        stored = any("text/html" in output.get("data", {}) for output in cell["outputs"])
        assert hasattr(shown, "_repr_html_") == stored
        tables += stored
    lod.show_progress(None)
    assert tables >= 3
    assert names["done"].history[-1].relative_params <= 0.3
