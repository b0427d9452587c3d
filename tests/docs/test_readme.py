"""The README keeps its promises: its example runs, its figures are the measured ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

import maestro_lod as lod

ROOT = Path(__file__).parents[2]


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_example_runs_and_gives_good_small_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", readme(), re.DOTALL).group(1)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "total" in capsys.readouterr().out
    x, y, dense = names["x"], names["y"], names["LeNet"]()
    summary = lod.summary(names["small"], x[:1])
    assert summary.macs <= 0.4 * lod.summary(dense, x[:1]).macs
    assert lod.summary(names["tiny"], x[:1]).fused_params <= 0.3 * count(dense)
    for name in ("model", "small", "tiny"):
        with torch.no_grad():
            right = names[name](x).argmax(1) == y
        assert right.float().mean() > 0.8, name


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_the_first_training_is_one_for_every_size():
    recipe = re.search(r"```yaml\n(.*?)```", readme(), re.DOTALL).group(1)
    commands = re.search(r"```sh\n(lod train.*?)```", readme(), re.DOTALL).group(1)
    assert "elastic: 0.1" in recipe and "budget" not in recipe
    first, *others = [line for line in commands.splitlines() if line.startswith("lod train")]
    assert first.split("#")[0].split() == ["lod", "train", "my.yaml"]
    assert all("--out" in line for line in others)  # a second training in a directory of its own


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
