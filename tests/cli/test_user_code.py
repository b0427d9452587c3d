"""Own modules are found beside the recipe that names them, wherever `lod` is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maestro_lod.cli import main as cli
from maestro_lod.cli import torchrun as together
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.errors import OptionError

PARTS = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

def data(batch):
    x = torch.randn(4, batch, 6)
    return {"train": list(zip(x, (x[..., 0] > 0).long()))}
"""
RECIPE = "{model: ownparts:model, data: ownparts:data, epochs: 1, batch: 8, threads: 1}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start in another directory than the recipe's, with nothing imported or trusted."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "ownparts.py").write_text(PARTS)
    (tmp_path / "project" / "mine.yaml").write_text(RECIPE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("LOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOD_TRUST", raising=False)
    yield
    sys.modules.pop("ownparts", None)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as a new process would."""
    sys.modules.pop("ownparts", None)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "project" not in p])


def test_a_run_is_opened_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(str(tmp_path / "project" / "mine.yaml"))
    assert recipe.code == tmp_path / "project"
    Run.create(recipe, tmp_path / "run").train()
    forget(monkeypatch)
    model, _ = Run.open(tmp_path / "run").trained()
    assert sum(1 for _ in model.parameters()) > 0


def test_a_recipe_says_where_its_code_is(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{{code: project, {RECIPE[1:]}")
    assert load_recipe(str(tmp_path / "mine.yaml")).code == tmp_path / "project"


def test_code_that_has_moved_is_an_error_that_says_where_it_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.create(load_recipe(str(tmp_path / "project" / "mine.yaml")), tmp_path / "run").train()
    forget(monkeypatch)
    shutil.move(tmp_path / "project", tmp_path / "moved")
    with pytest.raises(OptionError, match=r"cannot import 'ownparts'.*setting `code`"):
        Run.open(tmp_path / "run").trained()
    monkeypatch.chdir(tmp_path / "moved")
    Run.open(tmp_path / "run").trained()


def test_other_code_of_the_same_name_needs_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.create(load_recipe(str(tmp_path / "project" / "mine.yaml")), tmp_path / "run").train()
    forget(monkeypatch)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(tmp_path / "project"), str(tmp_path / "run")))
    (tmp_path / "run" / "ownparts.py").write_text("raise SystemExit('hostile')")
    with pytest.raises(OptionError, match="was not trained here by you"):
        Run.open(tmp_path / "run")


def test_a_directory_without_the_setting_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.create(load_recipe(str(tmp_path / "project" / "mine.yaml")), tmp_path / "run").train()
    forget(monkeypatch)
    config = tmp_path / "run" / "config.yaml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("code:")]
    config.write_text("\n".join(lines))
    (tmp_path / "run" / "ownparts.py").write_text("raise SystemExit('hostile')")
    with pytest.raises(OptionError, match="cannot import 'ownparts'"):
        Run.open(tmp_path / "run", trust=True).trained()


# -- code of others ------------------------------------------------------------------------------

SHADOW = "import pathlib; pathlib.Path(__file__).with_name('ran').touch(); raise SystemExit(9)"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of built-in parts, with modules that shadow installed ones in it."""
    made = tmp_path / "hostile"
    made.mkdir()
    for name in ("safetensors", "torch", "yaml", "pyarrow", "optuna", "lenet", "never_installed"):
        (made / f"{name}.py").write_text(SHADOW)
    settings = {"model": "lenet", "data": "digits", "epochs": 1, "code": str(made)}
    (made / "config.yaml").write_text(json.dumps(settings))
    return made


@pytest.mark.parametrize("command", ["summary", "frontier", "bench", "deploy", "resume", "report"])
@pytest.mark.parametrize("where", [".", "hostile"])
def test_no_folder_is_searched_for_parts_that_are_built_in(
    hostile: Path, command: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile if where == "." else hostile.parent)
    before = [*sys.path]
    out = ["--out", "phone"] if command == "deploy" else []
    with pytest.raises(SystemExit):
        cli.main([command, where, *out])
    assert sys.path == before and not (hostile / "ran").exists()


def test_a_folder_of_own_code_shadows_nothing(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(tmp_path / "project" / "ownparts.py", hostile)
    (hostile / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(hostile)
    before = [*sys.path]
    Run.create(load_recipe("mine.yaml"), tmp_path / "run").train()
    assert sys.path == [*before, str(hostile)]
    assert not (hostile / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-m maestro_lod", "path", "lod"])
def test_the_program_does_not_import_from_where_it_is_started(hostile: Path, how: str) -> None:
    started = {
        "-m maestro_lod": ["-m", "maestro_lod"],
        "path": [str(together._PROGRAM)],
        "lod": ["-c", "import sys; del sys.path[0]; from maestro_lod.cli.main import main; main()"],
    }[how]
    done = subprocess.run(
        [sys.executable, *started, "summary", "."], cwd=hostile, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("lod: the run in . has not finished")
    assert not (hostile / "ran").exists()
