"""`lod train` in several processes: the run of one process, whatever happens to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from maestro_lod.app.cli import main
from maestro_lod.app.recipe import load_recipe
from maestro_lod.app.run import Interrupted, Run
from maestro_lod.state import load_state
from maestro_lod.tensors import opened_file
from tests.own_run import RECIPE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(ROOT)
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE)
    return path


def torchrun(*arguments: Any, restarts: int = 0, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", str(restarts), "-m", "maestro_lod", *map(str, arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def weights(run: Run) -> dict[str, torch.Tensor]:
    with opened_file(run.model_file) as file:
        return {key: file.read(key) for key in file.shapes}


def assert_same_run(run: Run, alone: Run) -> None:
    assert len({record.total_rank for record in alone.epochs()}) > 4  # at least four shrinks
    assert [r.ranks for r in run.epochs()] == [r.ranks for r in alone.epochs()]
    for mine, theirs in zip(run.epochs(), alone.epochs(), strict=True):
        assert mine.train == pytest.approx(theirs.train, rel=1e-5)
        assert mine.validation == pytest.approx(theirs.validation, rel=1e-5)
    one = weights(alone)
    for key, value in weights(run).items():
        torch.testing.assert_close(value, one[key], rtol=1e-6, atol=1e-6)


def test_processes_that_are_killed_in_a_step_and_in_a_shrink_end_as_one_undisturbed(
    recipe, tmp_path
):
    alone = Run.create(load_recipe(str(recipe)), tmp_path / "alone")
    alone.train()
    done = torchrun(
        "train",
        recipe,
        "--out",
        tmp_path / "two",
        "--quiet",
        restarts=2,
        TEST_KILL_IN=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "step").exists() and (tmp_path / "shrink").exists()
    assert done.stderr.count("another process of this training has ended") == 2
    assert done.stdout.count("report:") == 1
    assert_same_run(Run(tmp_path / "two", alone.recipe), alone)


def test_a_run_goes_on_in_another_number_of_processes(recipe, tmp_path):
    alone = Run.create(load_recipe(str(recipe)), tmp_path / "alone")
    alone.train()
    stopped = Run.create(load_recipe(str(recipe)), tmp_path / "stopped")
    steps: list[int] = []

    def after_eight_steps() -> bool:
        steps.append(1)
        return len(steps) > 8

    with pytest.raises(Interrupted):
        stopped.train(stop=after_eight_steps)
    assert load_state(stopped.checkpoint)["progress"]["batch"] > 0  # in the middle of an epoch
    done = torchrun("resume", stopped.directory, "--quiet")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(stopped, alone)


def test_several_processes_have_to_be_told_where_the_run_is(recipe, monkeypatch, tmp_path, capsys):
    for key, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe)])
    assert ended.value.code == 2 and "--out" in capsys.readouterr().err
