"""`lod train` in several processes: the run of one process, whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from torch import distributed as dist

from maestro_lod.cli import signals as stopping
from maestro_lod.cli.display import Display
from maestro_lod.cli.main import main
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Interrupted, Run
from maestro_lod.errors import TrainingError
from maestro_lod.files.state import load_state
from maestro_lod.files.tensor_file import opened_file
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.lod_settings import LoDSettings
from tests.support import own_run
from tests.support.own_run import RECIPE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(ROOT)
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE)
    return path


def started(*command: Any, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def torchrun(*arguments: Any) -> subprocess.Popen[str]:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    return started(*launcher, "-m", "maestro_lod", *arguments)


def weights(run: Run) -> dict[str, torch.Tensor]:
    with opened_file(run.model_file) as file:
        return {key: file.read(key) for key in file.shapes}


def assert_same_run(run: Run, alone: Run) -> None:
    assert [r.ranks for r in run.epochs()] == [r.ranks for r in alone.epochs()]
    for epoch, same in zip(run.epochs(), alone.epochs(), strict=True):
        assert epoch.train == pytest.approx(same.train, rel=1e-5)
        assert epoch.validation == pytest.approx(same.validation, rel=1e-5)
    if isinstance(alone.recipe.settings, LoDSettings) and not alone.recipe.settings.penalty:
        # ranks are ordered by SVDs, where rounding can turn a factor, but not the product
        layers = (low_rank_layers(each.trained()[0]).values() for each in (run, alone))
        for mine, theirs in zip(*layers, strict=True):
            torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-3, atol=1e-4)
        return
    one = weights(alone)
    for key, value in weights(run).items():
        torch.testing.assert_close(value, one[key], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_that_are_killed_in_a_step_and_in_a_shrink_end_as_one_undisturbed(
    recipe, tmp_path
):
    alone = Run.create(load_recipe(str(recipe)), tmp_path / "alone")
    alone.train()
    assert len({record.total_rank for record in alone.epochs()}) > 4  # at least four shrinks
    going = started(
        "maestro_lod", "train", recipe, "--out", tmp_path / "two", "--quiet",
        "--nproc", 2, "--max-restarts", 2, TEST_KILL_IN=str(tmp_path),
    )  # fmt: skip
    said, complained = going.communicate()
    assert going.returncode == 0, complained[-3000:]
    assert (tmp_path / "step").exists() and (tmp_path / "shrink").exists()
    assert complained.count("another process of this training has ended") == 2, complained
    assert said.count("report:") == 1
    assert_same_run(Run(tmp_path / "two", alone.recipe), alone)


@pytest.mark.slow
@pytest.mark.multiprocess
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
    going = torchrun("resume", stopped.directory, "--quiet")
    _, complained = going.communicate()
    assert going.returncode == 0, complained[-3000:]
    assert_same_run(stopped, alone)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_signal_stops_all_processes_with_a_checkpoint_and_they_go_on(recipe, tmp_path):
    alone = Run.create(load_recipe(str(recipe)), tmp_path / "alone")
    alone.train()
    out = tmp_path / "two"
    going = started("maestro_lod", "train", recipe, "--out", out, "--nproc", 2, TEST_STOP="1")
    said, complained = going.communicate()
    assert going.returncode == 130, complained[-3000:]
    again = f"lod resume {out} --nproc 2"
    assert said.count(f"stopped; everything is saved. Resume with: {again}") == 1
    assert load_state(out / "checkpoint.safetensors")["progress"]["batch"] > 0
    Run.open(out).train()
    assert_same_run(Run(out, alone.recipe), alone)


# -- recipes, in two processes that are there already ----------------------------------------------

SEQUENCES = ["data=tests.support.own_run:sequences", "epochs=4"]
LSTM = [*SEQUENCES, "model=tests.support.own_run:Recurrent", "optimizer=adamw", "optimizer.lr=0.01"]
# by SGD: the bias of keys has no gradient but rounding, of which Adam makes whole steps
TRANSFORMER = [*SEQUENCES, "model=tests.support.own_run:Attending"]
DIGITS = ["epochs=3", "batch=360"]
CASES: dict[str, tuple[str, list[str]]] = {
    "digits, λ": ("digits", [*DIGITS, "penalty=1", "proximal=true"]),
    "digits, budget": ("digits", [*DIGITS, "budget.params=40%"]),
    "digits, elastic": ("digits", [*DIGITS, "elastic=0.2"]),
    "digits, dense": ("digits", [*DIGITS, "method=dense"]),
    "LSTM, λ": ("own", [*LSTM, "penalty=3"]),
    "LSTM, budget": ("own", [*LSTM, "budget.params=50%"]),
    "transformer, budget": ("own", [*TRANSFORMER, "budget.params=50%"]),
    "transformer, elastic": ("own", [*TRANSFORMER, "elastic=0.3"]),
}
_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
_watched: list[tuple[Path, list[str]]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what a process writes where it is watched; such a hook stays for good."""
    if not _watched or not (event == "open" or event in _WRITES):
        return
    writes = event in _WRITES or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    directory, seen = _watched[0]
    if writes and str(arguments[0]).startswith(str(directory)):
        seen.append(f"{event} {arguments[0]}")


def trained_together(recipe: str, changes: list[str], directory: Path) -> list[str]:
    """Train a recipe in processes that are a group already; return what this one has written."""
    process = str(dist.get_rank())
    told = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": str(dist.get_world_size())}
    written: list[str] = []
    sys.addaudithook(_audit)
    with pytest.MonkeyPatch.context() as patched:
        for key, value in (told | {"XDG_CONFIG_HOME": str(directory.parent)}).items():
            patched.setenv(key, value)
        _watched.append((directory, written))
        try:
            Run.create(load_recipe(recipe, changes), directory).train()
        finally:
            _watched.clear()
    return written


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_recipe_in_two_processes_is_the_run_of_one(case, recipe, tmp_path, pair):
    name, changes = CASES[case]
    path = str(recipe) if name == "own" else name
    alone = Run.create(load_recipe(path, changes), tmp_path / "alone")
    alone.train()
    by_first, by_second = pair(trained_together, path, changes, tmp_path / "two")
    assert any("report.html" in line for line in by_first) and by_second == []
    total = [record.total_rank for record in alone.epochs()]
    assert "λ" not in case or total[-1] < total[0]
    assert_same_run(Run(tmp_path / "two", alone.recipe), alone)


def trained_precisely(recipe: str, changes: list[str], directory: Path) -> list[str]:
    """Train in float64 in processes that are a group already; return all states on the way."""
    own_run.DIGESTS.clear()
    trained_together(recipe, changes, directory)
    return own_run.DIGESTS


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_in_float64_processes_are_equal_in_every_step_and_end_as_one(
    optimizer, recipe, tmp_path, pair
):
    changes = ["model=tests.support.own_run:Precise", "data=tests.support.own_run:doubles"]
    if optimizer == "adamw":
        changes += ["optimizer=adamw", "optimizer.lr=0.01", "penalty=2"]
    else:
        changes += ["penalty=0.5"]
    alone = Run.create(load_recipe(str(recipe), changes), tmp_path / "alone")
    alone.train()
    assert len({record.total_rank for record in alone.epochs()}) > 4  # at least four shrinks
    first, second = pair(trained_precisely, str(recipe), changes, tmp_path / "two")
    assert len(second) == 6 * 5 and first[: len(second)] == second  # then the first counts memory
    one = weights(alone)
    for key, value in weights(Run(tmp_path / "two", alone.recipe)).items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, one[key], rtol=1e-12, atol=1e-12)


def test_signals_wait_until_a_process_has_said_why_it_ends(recipe, monkeypatch):
    handled = []

    def complained(error: object, code: int) -> int:
        handled.append((str(error), callable(signal.getsignal(signal.SIGTERM))))
        return code

    monkeypatch.setattr(stopping, "complain", complained)
    before = signal.getsignal(signal.SIGTERM)
    display = Display(Console(), quiet=True)
    with (
        pytest.raises(typer.Exit),
        stopping.stoppable(display, load_recipe(str(recipe)), "again", lambda: True),
    ):
        raise TrainingError("another process has ended")
    assert handled == [("another process has ended", True)]
    assert signal.getsignal(signal.SIGTERM) == before == signal.SIG_DFL


# -- mistakes --------------------------------------------------------------------------------------


def test_several_processes_have_to_be_told_where_the_run_is(recipe, monkeypatch, tmp_path, capsys):
    for key, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe)])
    assert ended.value.code == 2 and "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "--out", str(tmp_path / "two"), "--nproc", "2"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "torchrun has started 2 processes already" in said
