"""What a run shows: live bars in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from maestro_lod.cli import display as display_module
from maestro_lod.cli.display import Display
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Interrupted, Run

SMALL = ["data.limit=40", "batch=8", "epochs=2", "threads=1", "penalty=0"]
LINE = re.compile(
    r"epoch [12]/2  validation loss \d\.\d{4}  accuracy \d+\.\d\d%  rank 236  params 1\.00×  "
    r"MACs 1\.00×  \d+\.\d s"
)


def shown(
    run: Run, *, terminal: bool, quiet: bool = False, stop: Callable[[], bool] = lambda: False
) -> str:
    """Train, and return all that was written to the screen."""
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=terminal, width=100), quiet)
    try:
        run.train([display], stop=stop)
    except Interrupted:
        pass
    finally:
        display.close()
    return screen.getvalue()


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be shown because a machine is slow; tests that are about time set their own."""
    monkeypatch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def digits(directory: Path, *changes: str) -> Run:
    return Run.create(load_recipe("digits", [*SMALL, *changes]), directory)


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    what, data, *epochs = shown(digits(tmp_path / "run"), terminal=False).splitlines()
    assert what == f"training digits into {tmp_path}/run: lenet on digits, method=lod, epochs=2"
    assert data.startswith("digits: 36 training, 4 validation and 40 test images")
    assert len(epochs) == 2 and all(LINE.fullmatch(line) for line in epochs), epochs


class Slow(Exception):
    """What data and model do, which take long."""


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        (["penalty=0"], "method=lod"),
        (["budget.params=25%"], "method=lod, a budget of params=0.25"),
        (["elastic=0.1"], "method=lod, elastic=0.1"),
        (["method=dense"], "method=dense"),
    ],
)
def test_what_is_trained_is_said_before_there_is_data_or_a_model(
    terminal: bool, changes: list[str], asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(recipe: object) -> None:
        raise Slow(screen.getvalue())

    monkeypatch.setattr("maestro_lod.cli.setup.data_of", load)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=40)
    run = Run.create(load_recipe("digits", changes), tmp_path / "run")
    with pytest.raises(Slow) as said:
        run.train([Display(console)])
    task = f"lenet on digits, {asked}, epochs=60"
    assert str(said.value) == f"training digits into {tmp_path}/run: {task}\n"


def test_live_bars_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = count(0, 3600)  # between steps: none comes too soon after the one before
    clock = SimpleNamespace(monotonic=lambda: next(hours))
    monkeypatch.setattr(display_module, "time", clock)
    screen = shown(digits(tmp_path / "run"), terminal=True)
    assert "\x1b[" in screen
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    assert len(LINE.findall(text)) == 2  # the lines stay above the bars
    assert re.search(r"training +[━╸╺ ]+ +\d+/10 .*rank 236  params 1\.00×  MACs 1\.00×", text)
    assert re.search(r"epoch 2/2 +[━╸╺ ]+ +\d/5 .*train loss \d\.\d{4}  accuracy \d+\.\d\d%", text)
    assert re.search(r"\d:\d\d:\d\d", text)  # the time left
    bars = [line for line in text.replace("\r", "\n").splitlines() if "━" in line]
    assert max(map(len, bars)) <= 100  # one line each
    assert screen.rindex("\x1b[2K") > screen.rindex("━")  # and gone in the end


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(tmp_path: Path, terminal: bool) -> None:
    assert shown(digits(tmp_path / "run"), terminal=terminal, quiet=True) == ""


def test_resumed_run_says_where_it_is(tmp_path: Path) -> None:
    run = digits(tmp_path / "run")
    steps = iter([False, False, True])
    shown(run, terminal=False, stop=lambda: next(steps))
    lines = shown(run, terminal=False).splitlines()
    assert lines[0].startswith(f"resuming {tmp_path}/run: lenet on digits")
    assert lines[2] == "resuming at epoch 1, batch 4"
    assert [line[:9] for line in lines[3:]] == ["epoch 1/2", "epoch 2/2"]
    (run.directory / "result.json").unlink()
    assert shown(run, terminal=False).endswith("\nresuming after the last epoch\n")


def test_resumed_bars_begin_where_they_were(tmp_path: Path) -> None:
    run = digits(tmp_path / "run")
    shown(run, terminal=False, stop=lambda: (run.directory / "metrics.jsonl").read_text() != "")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(run, terminal=True))
    assert re.search(r"training +[━╸╺ ]+ +5/10 .*rank 236  params 1\.00×", text)


def test_dense_training_has_no_ranks(tmp_path: Path) -> None:
    run = digits(tmp_path / "run", "method=dense", "data.validation=0")
    line = shown(run, terminal=False).splitlines()[-1]
    assert re.fullmatch(
        r"epoch 2/2  train loss \d\.\d{4}  accuracy \d+\.\d\d%  dense  \d+\.\d s", line
    )


def test_bars_come_down_when_a_run_fails(tmp_path: Path) -> None:
    class Failing(Display):
        def step(self, progress: object) -> None:
            raise RuntimeError

    screen = io.StringIO()
    display = Failing(Console(file=screen, force_terminal=True))
    with pytest.raises(RuntimeError):
        digits(tmp_path / "run").train([display])
    display.close()
    # the cursor is hidden while bars move, and shown again
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
