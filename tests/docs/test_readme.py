"""The README keeps its promises: its example runs, its figures are the measured ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_example_runs_and_ends_smaller(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", readme(), re.DOTALL).group(1)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "total" in capsys.readouterr().out
    last = names["done"].history[-1]
    assert last.relative_params <= 0.3
    assert last.train["accuracy"] > 0.8
    sizes = [sum(p.numel() for p in names[m].parameters()) for m in ("model", "small", "tiny")]
    assert sizes[0] > sizes[1] > sizes[2]


def test_every_linked_file_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", readme()):
        assert (ROOT / target).exists(), target


def test_every_make_target_that_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w+)", readme())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_table_is_generated_from_the_measurements():
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    page = (ROOT / "docs" / "measured.md").read_text()
    assert script["START"] + script["block"]() + script["END"] in page
